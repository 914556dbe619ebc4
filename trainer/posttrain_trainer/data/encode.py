"""What each method makes of a row: texts to tokenise, and what of them is learned.

A conversation gives one document, a pair of answers gives two (the prompt stands once in each), plain text gives one
that is cut into pieces later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from posttrain_trainer.contract.conversation import Conversation, Document, Preference, Row, TrainOn, is_learned
from posttrain_trainer.contract.messages import Message, RowFault
from posttrain_trainer.contract.methods import Method
from posttrain_trainer.data.mask import Encoder, Ids, Trained
from posttrain_trainer.data.spans import Span

Rendered = tuple[str, list[Span]]


class RowEncoder(Protocol):
    """Makes documents of rows."""

    def render(self, row: Row) -> list[Rendered]:
        """The texts of a row, equally many for each row, and the character spans that are learned.

        Raises:
            RowFault: The row cannot be used.
        """
        ...

    def tokenize(self, rendered: Sequence[Rendered]) -> list[tuple[Ids, Trained]]:
        """Ids and mask of each text, in one call of the tokenizer."""
        ...


def row_encoder(method: Method, tokenizer: Any, train_on: TrainOn) -> RowEncoder:
    """The encoder of a method's rows.

    Raises:
        InvalidArguments: The method needs a chat template, and the tokenizer has no usable one.
    """
    if method.kind == "pretrain":
        return DocumentEncoder(tokenizer)
    encoder = Encoder(tokenizer, train_on)
    return PairEncoder(encoder) if method.kind == "dpo" else ConversationEncoder(encoder)


class ConversationEncoder:
    """One document a row."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.tokenize = encoder.tokenize

    def render(self, row: Row) -> list[Rendered]:
        """See `RowEncoder`."""
        assert isinstance(row, Conversation)
        return [self._encoder.render(row)]


class PairEncoder:
    """Two documents a row: prompt with chosen, prompt with rejected; the assistant's turns of the answers are learned."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.tokenize = encoder.tokenize

    def render(self, row: Row) -> list[Rendered]:
        """See `RowEncoder`."""
        assert isinstance(row, Preference)
        prompt = tuple(message.untrained() for message in row.prompt)
        return [self._rendered(prompt, answer, row, name) for name, answer in (("chosen", row.chosen), ("rejected", row.rejected))]

    def _rendered(self, prompt: tuple[Message, ...], answer: tuple[Message, ...], row: Preference, name: str) -> Rendered:
        turns = tuple(replace(turn, train=is_learned(turn)) for turn in answer)
        try:
            return self._encoder.render(Conversation(prompt + turns, row.tools))
        except RowFault as fault:
            raise RowFault(f"{name}: {fault}") from fault


class DocumentEncoder:
    """Plain text between the tokens that the tokenizer itself puts around it, closed by its end token; all of it is learned."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, row: Row) -> list[Rendered]:
        """See `RowEncoder`."""
        assert isinstance(row, Document)
        return [(row.text, [])]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[tuple[Ids, Trained]]:
        """See `RowEncoder`."""
        if not rendered:
            return []
        found = []
        encoded = self._tokenizer([text for text, _ in rendered], return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            if ids[-1:] != [self._tokenizer.eos_token_id]:
                ids.append(self._tokenizer.eos_token_id)
            found.append((np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_)))
        return found
