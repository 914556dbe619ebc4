"""What a row of a data set may look like, and what it means: a Conversation, a Preference or a Document.

No torch, so the service reports on a file line by line before a job starts. Reading bytes stands in `rowfile`, the
parts of a message in `messages`.

| shape | keys |
|---|---|
| messages | messages, tools?, unmask? |
| prompt_completion | prompt, completion (text or messages), tools? |
| question_answer | question, answer |
| alpaca | instruction, input?, output, system?, history? |
| sharegpt | conversations [{from, value}], system?, tools? |
| llama_stack_instruct | chat_completion_input (JSON text of messages), expected_answer, input_query? |
| llama_stack_dialog | dialog (JSON text of messages; every turn counts) |
| preference | prompt?, chosen, rejected (text or messages), tools? |
| openai_preference | input.messages, preferred_output, non_preferred_output |
| document | text, document or content, or a named column |

Other keys (an id, a source) are left out and counted in the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from posttrain_trainer.contract.messages import Message, RowFault, as_text, parse_messages, parse_sharegpt, parse_tools
from posttrain_trainer.contract.rowfile import MAX_ROW_BYTES, RawRow, read_rows


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, and the tools that were on offer."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    unmask: bool = False
    """Train on every turn but the system's, whatever `train_on` says."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, the first better than the second."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text to go on training with."""

    text: str


Row = Conversation | Preference | Document
Kind = Literal["conversation", "preference", "document"]


class RowError(NamedTuple):
    """One bad row."""

    line: int
    """Line where the row begins, from 1."""
    message: str
    """Where in the row, what is wrong, and the remedy."""


class ParsedRow(NamedTuple):
    """One row of a file: `row` or `error` is set, never both."""

    line: int
    row: Row | None
    error: str | None
    format: str | None
    """Name of the shape; None when it was not recognised."""
    ignored: tuple[str, ...]
    """Keys that have no meaning in this shape."""
    fatal: bool = False
    """Whether the file could not be read past this row."""


@dataclass(slots=True)
class RowReport:
    """What a file holds."""

    rows: int = 0
    """Rows found, good and bad."""
    format: str | None = None
    """Shape of the rows; the most frequent one where they differ; None when there is no good row."""
    formats: dict[str, int] = field(default_factory=dict)
    """Good rows of each shape."""
    errors: list[RowError] = field(default_factory=list)
    """The first bad rows, up to the `max_errors` asked for."""
    num_errors: int = 0
    """All bad rows; a file without any row counts as one."""
    fatal: bool = False
    """Whether the file could not be read to its end (cut archive, not UTF-8): leaving bad rows out would lose unseen ones."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Keys that have no meaning, with the number of rows that hold them (the first 50 names)."""

    @property
    def valid(self) -> bool:
        """Whether every row is good and there is at least one."""
        return self.num_errors == 0

    def add(self, parsed: ParsedRow, max_errors: int) -> None:
        """Count one row; a fault of the whole file is an error, but no row."""
        self.rows += not parsed.fatal
        for key in parsed.ignored:
            if key in self.ignored or len(self.ignored) < 50:
                self.ignored[key] = self.ignored.get(key, 0) + 1
        if parsed.error is not None:
            self.fatal |= parsed.fatal
            self._fail(parsed.line, parsed.error, max_errors)
        elif parsed.format is not None:
            self.formats[parsed.format] = self.formats.get(parsed.format, 0) + 1

    def close(self, max_errors: int) -> RowReport:
        """Complete the report after the last row."""
        if self.rows == 0 and not self.fatal:
            self.fatal = True
            self._fail(1, "the file holds no rows", max_errors)
        if self.formats:
            self.format = Counter(self.formats).most_common(1)[0][0]
        return self

    def _fail(self, line: int, message: str, max_errors: int) -> None:
        self.num_errors += 1
        if len(self.errors) < max_errors:
            self.errors.append(RowError(line, message))


def validate_file(
    path: Path, *, max_errors: int = 100, name: str | None = None, kind: Kind | None = None, text_column: str | None = None,
    max_row_bytes: int = MAX_ROW_BYTES, max_bytes: int | None = None,
) -> RowReport:  # fmt: skip
    """Check every row of a file, in one pass and constant memory.

    Args:
        path: The file.
        max_errors: Most bad rows that are listed; all are counted.
        name: The name to go by where `path` is a stored upload without one (tells CSV).
        kind: What the rows must mean; None = any of the three, but one for the whole file.
        text_column: Column of documents; None = text, document or content.
        max_row_bytes: Longest row.
        max_bytes: Most bytes of unpacked text; None = no limit.

    Raises:
        OSError: The file cannot be opened or read.
    """
    rows = iter_rows(path, name=name, kind=kind, text_column=text_column, max_row_bytes=max_row_bytes, max_bytes=max_bytes)
    return _report(rows, max_errors)


def validate_rows(values: Iterable[Any], *, max_errors: int = 100, kind: Kind | None = None, text_column: str | None = None) -> RowReport:
    """Check rows that came inline; their place in the list, from 1, stands for the line."""
    raw = (RawRow(number, value) for number, value in enumerate(values, start=1))
    return _report(parse_rows(raw, kind=kind, text_column=text_column), max_errors)


def iter_rows(
    path: Path, *, name: str | None = None, kind: Kind | None = None, text_column: str | None = None,
    max_row_bytes: int = MAX_ROW_BYTES, max_bytes: int | None = None,
) -> Iterator[ParsedRow]:  # fmt: skip
    """Every row of a file in order, bad ones with their error; arguments as for `validate_file`.

    Raises:
        OSError: The file cannot be opened or read.
    """
    return parse_rows(read_rows(path, name=name, max_row_bytes=max_row_bytes, max_bytes=max_bytes), kind=kind, text_column=text_column)


def parse_rows(raw: Iterable[RawRow], *, kind: Kind | None = None, text_column: str | None = None) -> Iterator[ParsedRow]:
    """The meaning of each row; with no `kind` given, the first good row decides it for all."""
    for line, value, error, fatal in raw:
        if error is not None:
            yield ParsedRow(line, None, error, None, (), fatal)
            continue
        try:
            row, shape, ignored = parse_row(value, text_column=text_column)
        except RowFault as fault:
            yield ParsedRow(line, None, str(fault), None, ())
            continue
        kind = _kind(row) if kind is None else kind
        if _kind(row) == kind:
            yield ParsedRow(line, row, None, shape, ignored)
        else:
            yield ParsedRow(line, None, f"is a row of the shape {shape}, but each row must be a {kind}", None, ignored)


def parse_row(value: Any, *, text_column: str | None = None) -> tuple[Row, str, tuple[str, ...]]:
    """The meaning of one decoded row: the row, the name of its shape, and the keys that were left out.

    Raises:
        RowFault: The row is of no known shape, or not well-formed; says where and what to do.
    """
    if not isinstance(value, dict):
        raise RowFault(f"must be an object with named fields, not {type(value).__name__}")
    present = {key: item for key, item in value.items() if item is not None}
    if text_column is not None:
        return Document(as_text(present.get(text_column), text_column)), "document", _others(present, {text_column})
    for shape in _SHAPES:
        if all(key in present for key in shape.needs):
            return shape.parse(present), shape.name, _others(present, {*shape.needs, *shape.takes, "metadata"})
    raise RowFault(f"has the keys {sorted(present)[:10]}, which are no known shape; use messages, or prompt and completion")


def _kind(row: Row) -> Kind:
    if isinstance(row, Conversation):
        return "conversation"
    return "preference" if isinstance(row, Preference) else "document"


def _others(row: dict[str, Any], known: set[str]) -> tuple[str, ...]:
    return tuple(str(key)[:64] for key in row if key not in known)


def _report(rows: Iterable[ParsedRow], max_errors: int) -> RowReport:
    report = RowReport()
    for row in rows:
        report.add(row, max_errors)
    return report.close(max_errors)


def _messages(row: dict[str, Any]) -> Row:
    unmask = row.get("unmask", False)
    if not isinstance(unmask, bool):
        raise RowFault(f"unmask: must be true or false, not {unmask!r}")
    return Conversation(parse_messages(row["messages"], "messages"), parse_tools(row.get("tools")), unmask)


def _context(turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """A prompt: its own assistant turns were said by somebody and are not learned."""
    return tuple(m.untrained() if m.role == "assistant" and m.train is None else m for m in turns)


def _turns(value: Any, where: str, role: Literal["user", "assistant"]) -> tuple[Message, ...]:
    if isinstance(value, list | dict):
        return parse_messages(value if isinstance(value, list) else [value], where)
    return (Message(role, as_text(value, where)),)


def _pair(question: str, answer: str) -> Callable[[dict[str, Any]], Row]:
    def parse(row: dict[str, Any]) -> Row:
        turns = _context(_turns(row[question], question, "user")) + _turns(row[answer], answer, "assistant")
        return Conversation(turns, parse_tools(row.get("tools")))

    return parse


def _alpaca(row: dict[str, Any]) -> Row:
    turns = _system(row)
    for number, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowFault(f"history[{number}]: must be a pair of question and answer")
        turns += [Message("user", as_text(pair[0], f"history[{number}][0]"))]
        turns += [Message("assistant", as_text(pair[1], f"history[{number}][1]"))]
    question = as_text(row["instruction"], "instruction")
    if row.get("input"):
        question += "\n\n" + as_text(row["input"], "input")
    turns += [Message("user", question), Message("assistant", as_text(row["output"], "output"))]
    return Conversation(tuple(turns))


def _system(row: dict[str, Any]) -> list[Message]:
    return [Message("system", as_text(row["system"], "system"))] if row.get("system") else []


def _sharegpt(row: dict[str, Any]) -> Row:
    turns = (*_system(row), *parse_sharegpt(row["conversations"], "conversations"))
    return Conversation(turns, parse_tools(row.get("tools")))


def _instruct(row: dict[str, Any]) -> Row:
    turns = _context(parse_messages(row["chat_completion_input"], "chat_completion_input", as_list=True))
    return Conversation((*turns, Message("assistant", as_text(row["expected_answer"], "expected_answer"))))


def _dialog(row: dict[str, Any]) -> Row:
    return Conversation(parse_messages(row["dialog"], "dialog"))


def _preference(row: dict[str, Any]) -> Row:
    prompt = _turns(row["prompt"], "prompt", "user") if "prompt" in row else ()
    chosen = _turns(row["chosen"], "chosen", "assistant")
    rejected = _turns(row["rejected"], "rejected", "assistant")
    if not prompt:  # both answers are whole conversations: what they share is the prompt
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    return _checked(Preference(prompt, chosen, rejected, parse_tools(row.get("tools"))))


def _openai_preference(row: dict[str, Any]) -> Row:
    source = row["input"]
    if not isinstance(source, dict) or "messages" not in source:
        raise RowFault("input: must be an object with messages")
    chosen = parse_messages(row["preferred_output"], "preferred_output")
    rejected = parse_messages(row["non_preferred_output"], "non_preferred_output")
    return _checked(Preference(parse_messages(source["messages"], "input.messages"), chosen, rejected, parse_tools(source.get("tools"))))


def _checked(row: Preference) -> Preference:
    if not row.prompt:
        raise RowFault("prompt: is missing, and chosen and rejected share no first turn")
    if not row.chosen or not row.rejected or row.chosen == row.rejected:
        raise RowFault("chosen and rejected must be two different answers")
    return row


def _document(column: str) -> Callable[[dict[str, Any]], Row]:
    def parse(row: dict[str, Any]) -> Row:
        if "role" in row:
            raise RowFault("is a single message; give the turns of one conversation as a list in messages")
        return Document(as_text(row[column], column))

    return parse


class _Shape(NamedTuple):
    name: str
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    parse: Callable[[dict[str, Any]], Row]


# In order: a row with the keys of several shapes is of the first that it has all keys of.
_SHAPES = (
    _Shape("preference", ("chosen", "rejected"), ("prompt", "tools"), _preference),
    _Shape("openai_preference", ("input", "preferred_output", "non_preferred_output"), (), _openai_preference),
    _Shape("messages", ("messages",), ("tools", "unmask"), _messages),
    _Shape("sharegpt", ("conversations",), ("system", "tools"), _sharegpt),
    _Shape("prompt_completion", ("prompt", "completion"), ("tools",), _pair("prompt", "completion")),
    _Shape("question_answer", ("question", "answer"), ("tools",), _pair("question", "answer")),
    _Shape("alpaca", ("instruction", "output"), ("input", "system", "history"), _alpaca),
    _Shape("llama_stack_dialog", ("dialog",), ("input_query", "expected_answer", "chat_completion_input"), _dialog),
    _Shape("llama_stack_instruct", ("chat_completion_input", "expected_answer"), ("input_query",), _instruct),
    _Shape("document", ("text",), (), _document("text")),
    _Shape("document", ("document",), (), _document("document")),
    _Shape("document", ("content",), (), _document("content")),
)
