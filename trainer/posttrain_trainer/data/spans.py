"""Where, in a rendered conversation, each turn's own text stands: character spans, proven against the template.

Three ways, the first that holds for a row: the template's `{% generation %}` blocks; growing prefixes (the text up to
an answer must be a prefix of the whole); character offsets of marked contents, for templates that rewrite earlier
turns (Qwen3 drops old reasoning, Mistral moves the system turn). A row that none of them explains is refused.
"""

from __future__ import annotations

import re
from typing import Any

from posttrain_trainer.contract.conversation import Conversation
from posttrain_trainer.contract.messages import RowFault
from posttrain_trainer.data.template import ChatTemplate

Span = tuple[int, int]
_MARK = "Qj7xQ"
_MARKS = re.compile(_MARK + r"([ab])(\d+)z")


def turn_spans(template: ChatTemplate, row: Conversation, wanted: list[int]) -> tuple[str, dict[int, Span]]:
    """The rendered conversation, and for each wanted turn the span to train on: its text with the end-of-turn marker.

    Args:
        template: The model's template.
        row: The conversation.
        wanted: Numbers of the turns to train on, ascending.

    Raises:
        RowFault: The template cannot render the row, or nothing shows for certain where a turn's text stands.
    """
    view = _View(template, row)
    answers = [k for k in wanted if row.messages[k].role == "assistant"]
    others = [k for k in wanted if row.messages[k].role != "assistant"]
    spans: dict[int, Span] = {}
    if answers:
        spans = view.by_generation(answers) if template.has_generation(tools=bool(row.tools)) else view.by_text(answers)
    if others:
        marked = view.contents()
        spans |= {k: view.with_end(marked[k]) for k in others if k in marked}
    return view.text, dict(sorted(spans.items()))


class _View:
    """One conversation with its full rendering."""

    def __init__(self, template: ChatTemplate, row: Conversation) -> None:
        self._template = template
        self._row = row
        self._frame = template.frame
        self._tools = list(row.tools) or None
        self._turns = [message.as_dict() for message in row.messages]
        self._generation: list[Span] = []
        if template.has_generation(tools=bool(row.tools)):
            self.text, self._generation = template.render_marked(self._turns, self._tools)
        else:
            self.text = template.render(self._turns, self._tools)

    def by_generation(self, wanted: list[int]) -> dict[int, Span]:
        answers = [k for k, message in enumerate(self._row.messages) if message.role == "assistant"]
        if len(self._generation) == len(answers):
            blocks = dict(zip(answers, self._generation, strict=True))
        else:  # several blocks a turn, or none for some: sort them into the turns' own spans
            blocks = {k: self._covered(span, k) for k, span in self.by_text(answers).items()}
        return {k: self._ended(blocks[k]) for k in wanted}

    def _covered(self, span: Span, turn: int) -> Span:
        inside = [(start, end) for start, end in self._generation if span[0] <= start and end <= span[1] + len(self._frame.tail)]
        if not inside:
            raise RowFault(f"messages[{turn}]: the chat template's generation tags leave this answer out")
        return inside[0][0], inside[-1][1]

    def _ended(self, span: Span) -> Span:
        """The span with the end-of-turn marker in it, and nothing after."""
        start, end = span
        marker = self._frame.end
        if not marker.strip():
            return span
        end = start + len(self.text[start:end].rstrip()) if self.text[start:end].rstrip().endswith(marker.strip()) else end
        return (start, end) if self.text[start:end].endswith(marker.strip()) else self.with_end((start, end))

    def with_end(self, span: Span) -> Span:
        """The span, longer by the end-of-turn marker if that follows it directly."""
        start, end = span
        return start, end + len(self._frame.end) if self.text.startswith(self._frame.end, end) else end

    def by_text(self, wanted: list[int]) -> dict[int, Span]:
        spans: dict[int, Span] = {}
        for k in wanted:
            span = self._by_prefix(k)
            if span is None:
                return self._by_offsets(wanted)
            spans[k] = span
        return spans

    def _by_prefix(self, k: int) -> Span | None:
        """The text that turn `k` adds to the turns before it with the answer opened; None if the whole says otherwise."""
        if k == 0:
            return None
        before = self._template.render(self._turns[:k], self._tools, prompt=True)
        is_last = k == len(self._turns) - 1
        until = self.text if is_last else self._template.render(self._turns[: k + 1], self._tools)
        end = self._end_of_last(until, self._frame.last_end if is_last else self._frame.end)
        if end is None or end <= len(before) or not self.text.startswith(before) or self.text[:end] != until[:end]:
            return None
        return len(before), end

    def _end_of_last(self, text: str, marker: str) -> int | None:
        tail = self._frame.tail
        if text.endswith(tail):
            return len(text) - len(tail) + len(marker)
        # Calls of tools may end by a marker of their own (Llama 3.1: <|eom_id|>).
        return self._template.end_token(text)

    def _by_offsets(self, wanted: list[int]) -> dict[int, Span]:
        contents = self.contents()
        spans = {}
        for k in wanted:
            spans[k] = self._header_span(k, contents) if self._frame.header or k == 0 else self._handover_span(k, contents)
            said = self._row.messages[k].content.split("</think>")[-1].strip()
            if said not in self.text[slice(*spans[k])]:
                raise self._unclear(k)
        return spans

    def _window(self, k: int, contents: dict[int, Span]) -> tuple[int, int, int]:
        """Number of the last marked turn before `k` (-1: none), where its text ends, and where the next marked text begins."""
        before = max((i for i in contents if i < k), default=-1)
        floor = contents[before][1] if before >= 0 else 0
        ceiling = min((start for i, (start, _) in contents.items() if i > k and start >= floor), default=len(self.text))
        return before, floor, ceiling

    def _header_span(self, k: int, contents: dict[int, Span]) -> Span:
        """Count the headers that open an answer between two marked texts: the n-th opens the n-th answer."""
        before, floor, ceiling = self._window(k, contents)
        after = min((i for i in contents if i > k), default=len(self._turns))
        answers = [i for i in range(before + 1, after) if self._row.messages[i].role == "assistant"]
        starts = [found.end() for found in re.finditer(re.escape(self._frame.header), self.text[floor:ceiling])] if self._frame.header else []
        if len(starts) != len(answers):
            raise self._unclear(k)
        place = answers.index(k)
        stop = floor + starts[place + 1] - len(self._frame.header) if place + 1 < len(starts) else ceiling
        return self._closed(k, floor + starts[place], stop)

    def _handover_span(self, k: int, contents: dict[int, Span]) -> Span:
        """Where nothing but the end of the turn before opens an answer, that turn must be marked and stand right before."""
        before, floor, ceiling = self._window(k, contents)
        if before != k - 1:
            raise self._unclear(k)
        opened = self._strip(self._template.render(self._marked(k), self._tools, prompt=True))
        handover = opened[0][opened[1][before][1] :]
        if not self.text.startswith(handover, floor):
            raise self._unclear(k)
        return self._closed(k, floor + len(handover), ceiling)

    def _closed(self, k: int, start: int, stop: int) -> Span:
        is_last = k == len(self._turns) - 1
        marker = self._frame.last_end if is_last else self._frame.end
        found = self.text.rfind(marker, start, stop) if marker.strip() else -1
        if found < 0:
            raise self._unclear(k)
        return start, found + len(marker)

    def contents(self) -> dict[int, Span]:
        """The span of each turn's content but the assistant's, by rendering the conversation with marks around them.

        Raises:
            RowFault: Without its marks that rendering is not the original one, so it proves nothing.
        """
        text, spans = self._strip(self._template.render(self._marked(len(self._turns)), self._tools))
        if text != self.text:
            raise RowFault("the chat template rewrites these turns in a way that hides which tokens are whose")
        return spans

    def _marked(self, count: int) -> list[dict[str, Any]]:
        turns = []
        for k, turn in enumerate(self._turns[:count]):
            core = turn["content"].strip()
            if turn["role"] != "assistant" and core:
                space, rest = turn["content"].split(core, 1)
                turn = {**turn, "content": f"{space}{_MARK}a{k}z{core}{_MARK}b{k}z{rest}"}
            turns.append(turn)
        return turns

    def _strip(self, marked: str) -> tuple[str, dict[int, Span]]:
        """The text without its marks, and where they stood."""
        starts: dict[int, int] = {}
        spans: dict[int, Span] = {}
        pieces, at, size = [], 0, 0
        for mark in _MARKS.finditer(marked):
            pieces.append(marked[at : mark.start()])
            size += len(pieces[-1])
            at = mark.end()
            number = int(mark[2])
            if mark[1] == "a":
                starts[number] = size
            elif number in starts:
                spans[number] = (starts[number], size)
        return "".join([*pieces, marked[at:]]), spans

    def _unclear(self, k: int) -> RowFault:
        return RowFault(f"messages[{k}]: the chat template rewrites earlier turns, and which tokens are this answer's is not certain")
