"""A tokenizer's chat template: rendering, and what can be learned about it by rendering sentinels.

Which tokens are trained on is decided in `mask`; which template a model has, in `models`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.messages import RowFault

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_USER, _ANSWER, _NEXT = "QjxUserQjx", "QjxAnswerQjx", "QjxNextQjx"
_ROW_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class Frame:
    """The fixed text that a template puts around an assistant's turn."""

    handover: str
    """From the end of a user's text to where the assistant's own text begins."""
    header: str
    """The part of `handover` that opens the assistant's turn; empty where the user's end is all there is (Mistral)."""
    end: str
    """End-of-turn marker that follows the assistant's text, e.g. `<|im_end|>`; may be empty or white space."""
    last_end: str
    """The same for the last turn of a conversation; longer than `end` where only that one gets an end token."""
    tail: str
    """All that follows the assistant's text when it is the last turn."""


class ChatTemplate:
    """Renders conversations by a tokenizer's template.

    Args:
        tokenizer: A fast tokenizer with `chat_template` set.

    Raises:
        InvalidArguments: There is no template, it is not Jinja, it cannot render a question and its answer, or the
            tokenizer cannot say which characters a token came from.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise InvalidArguments(f"{type(tokenizer).__name__} gives no character offsets; use the model's fast tokenizer (tokenizer.json)")
        if not tokenizer.chat_template:
            raise InvalidArguments("the model has no chat template; name one by chat_template (chatml, or Jinja text)")
        self._tokenizer = tokenizer
        self._texts: dict[bool, str] = {}
        self._added = sorted((str(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
        self.frame = self._probe()

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, prompt: bool = False) -> str:
        """The conversation as text.

        Args:
            messages: Turns as `Message.as_dict` gives them; at least one.
            tools: Tools on offer; None = none.
            prompt: Also open the assistant's next turn, as for generation.

        Raises:
            RowFault: The template refuses these turns.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt)
            )
        except _ROW_ERRORS as error:
            raise RowFault(f"the model's chat template cannot render these turns: {error}") from error

    def render_marked(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the character spans of its `{% generation %}` blocks.

        Raises:
            RowFault: The template refuses these turns.
        """
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=self._text(bool(tools)),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except _ROW_ERRORS as error:
            raise RowFault(f"the model's chat template cannot render these turns: {error}") from error
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]

    def has_generation(self, *, tools: bool = False) -> bool:
        """Whether the template marks the assistant's text by `{% generation %}`."""
        return _GENERATION.search(self._text(tools)) is not None

    def mentions(self, *names: str, tools: bool = False) -> bool:
        """Whether the template speaks of any of these fields; one it does not speak of would be lost."""
        return any(name in self._text(tools) for name in names)

    def end_token(self, text: str) -> int | None:
        """Where the token of the vocabulary's added ones ends that the text, but for white space, ends with; None = no such token."""
        body = text.rstrip()
        return len(body) if any(body.endswith(token) for token in self._added) else None

    def _text(self, tools: bool) -> str:
        """The template's own text; a model may have another for conversations with tools."""
        if tools not in self._texts:
            self._texts[tools] = self._tokenizer.get_chat_template(None, [{}] if tools else None)
        return self._texts[tools]

    def _probe(self) -> Frame:
        user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
        try:
            asked, opened = self.render([user]), self.render([user], prompt=True)
            answered = self.render([user, answer])
            going_on = self.render([user, answer, {"role": "user", "content": _NEXT}])
        except RowFault as fault:
            raise InvalidArguments(f"the chat template cannot render a question and its answer: {fault}") from fault
        for text, parts in ((asked, (_USER,)), (opened, (_USER,)), (answered, (_USER, _ANSWER)), (going_on, (_USER, _ANSWER, _NEXT))):
            if any(text.count(part) != 1 for part in parts):
                raise InvalidArguments("the chat template leaves out or repeats a turn's content; it cannot be trained with")
        between = answered.split(_USER)[1].split(_ANSWER)[0]
        handover = common_prefix(opened.split(_USER)[1], between)
        header = handover[len(common_prefix(handover, asked.split(_USER)[1])) :]
        tail = answered.split(_ANSWER)[1]
        end = self._marker(common_prefix(tail, going_on.split(_ANSWER)[1].split(_NEXT)[0]))
        return Frame(handover, header, end, end if end.strip() else self._marker(tail), tail)

    def _marker(self, text: str) -> str:
        """The end-of-turn marker that `text`, which follows an answer, begins with."""
        body = text.lstrip()
        space = text[: len(text) - len(body)]
        for token in self._added:
            if body.startswith(token):
                return space + token
        word = re.match(r"\S+", body)
        return space + word[0] if word else text


def common_prefix(a: str, b: str) -> str:
    """The longest text that both begin with."""
    shorter = min(len(a), len(b))
    return a[: next((i for i in range(shorter) if a[i] != b[i]), shorter)]
