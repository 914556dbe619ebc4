"""Conversation -> token ids, and which of them are trained on.

The rendered text is tokenised once, as a whole and without adding special tokens (the template has them), so ids are
what the model will see at generation; the mask comes from character spans, never from counting tokens of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from posttrain_trainer.contract.conversation import Conversation, TrainOn, trained_turns
from posttrain_trainer.contract.messages import RowFault
from posttrain_trainer.data.spans import Span, turn_spans
from posttrain_trainer.data.template import ChatTemplate

Ids = npt.NDArray[np.int32]
Trained = npt.NDArray[np.bool_]


def encode(row: Conversation, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and, for each token, whether it is learned.

    Raises:
        RowFault: The template refuses the row, has no place for something in it, or leaves in doubt what is whose.
        InvalidArguments: The tokenizer has no usable chat template.
    """
    ids, trained = Encoder(tokenizer, train_on).encode(row)
    return ids.tolist(), trained.tolist()


class Encoder:
    """`encode` for many rows, with the template probed once.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        train_on: Which turns are learned unless a message or row says otherwise.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> None:
        self.template = ChatTemplate(tokenizer)
        self._tokenizer = tokenizer
        self._train_on = train_on

    def encode(self, row: Conversation) -> tuple[Ids, Trained]:
        """Ids (int32, [L]) and mask (bool, [L]) of one row; errors as for `encode`."""
        text, spans = self.render(row)
        return self.tokenize([(text, spans)])[0]

    def render(self, row: Conversation) -> tuple[str, list[Span]]:
        """The text of a row and the character spans that are trained on; errors as for `encode`."""
        self._check_supported(row)
        text, spans = turn_spans(self.template, row, trained_turns(row, self._train_on))
        return text, list(spans.values())

    def tokenize(self, rendered: Sequence[tuple[str, list[Span]]]) -> list[tuple[Ids, Trained]]:
        """Ids and mask of rendered rows, all in one call of the tokenizer."""
        if not rendered:
            return []
        texts = [text for text, _ in rendered]
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
        return [
            (np.asarray(ids, dtype=np.int32), token_mask(offsets, spans))
            for ids, offsets, (_, spans) in zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        ]

    def _check_supported(self, row: Conversation) -> None:
        """Refuse what the template would leave out without a word."""
        tools = bool(row.tools)
        if tools and not self.template.mentions("tools", tools=True):
            raise _no_place("tools")
        for number, message in enumerate(row.messages):
            if message.tool_calls and not self.template.mentions("tool_calls", tools=tools):
                raise _no_place(f"messages[{number}].tool_calls")
            if message.reasoning and not self.template.mentions("reasoning", "thinking", tools=tools):
                raise _no_place(f"messages[{number}].reasoning_content")


def token_mask(offsets: Any, spans: Sequence[Span]) -> Trained:
    """Which tokens stand, at least in part, inside one of the spans.

    Args:
        offsets: Character span of each token, [L, 2]. A span of no width (white space that a byte-level tokenizer
            trims) stands for the characters just before it.
        spans: Character spans to train on.
    """
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    start, end = places[:, 0], places[:, 1]
    start = np.where(start == end, start - 1, start)
    trained = np.zeros(len(places), dtype=np.bool_)
    for first, stop in spans:
        trained |= (start < stop) & (end > first)
    return trained


def _no_place(where: str) -> RowFault:
    return RowFault(f"{where}: the model's chat template has no place for this; name a chat_template that has, or remove it from the row")
