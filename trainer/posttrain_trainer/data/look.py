"""What a person wants to see of a tokenised data set: how long samples are, how they pack, what is trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from posttrain_trainer.data.batch import IGNORE, Sample
from posttrain_trainer.data.groups import Groups
from posttrain_trainer.data.pack import pack, plan_padded
from posttrain_trainer.data.prepare import Prepared


def histogram(lengths: npt.NDArray[np.int32]) -> list[dict[str, int]]:
    """How many samples have up to 16, 32, 64, ... tokens: `[{"up_to", "samples"}]`, without empty ends."""
    bounds = 2 ** np.arange(4, max(5, int(np.ceil(np.log2(max(2, lengths.max(initial=1))))) + 1))
    counts = np.bincount(np.searchsorted(bounds, lengths), minlength=len(bounds))
    used = np.flatnonzero(counts)
    return [{"up_to": int(bounds[n]), "samples": int(counts[n])} for n in range(used[0], used[-1] + 1)]


def packing(dataset: Prepared, max_batch_len: int) -> dict[str, Any]:
    """How full micro-batches of `max_batch_len` tokens are when the whole set is packed, and when it is padded instead.

    Returns:
        `{"max_batch_len", "micro_batches", "efficiency", "padded_efficiency"}`: the fewest micro-batches that could hold
        the tokens as a share of those that do, and tokens as a share of the room that they have with padding.
    """
    tokens = int(dataset.lengths.sum(dtype=np.int64))
    _, bins = pack(dataset.lengths, max_batch_len)
    room = 0
    for slots in plan_padded(dataset.padded_lengths, max_batch_len, 1):
        for numbers in slots:
            room += len(numbers) * int(dataset.padded_lengths[numbers].max(initial=0))
    return {
        "max_batch_len": max_batch_len,
        "micro_batches": bins,
        "efficiency": -(-tokens // max_batch_len) / bins,
        "padded_efficiency": tokens / room,
    }


def segments(dataset: Prepared, tokenizer: PreTrainedTokenizerBase, number: int) -> list[list[dict[str, Any]]]:
    """The text of a sample, cut where training on it begins or ends: for each of its documents `[{"text", "trained"}]`."""
    sample = dataset.sample(number)
    documents: tuple[Sample, ...] = sample.documents if isinstance(dataset, Groups) else (sample,)  # type: ignore[union-attr, assignment]
    return [_cut(tokenizer, *document) for document in documents]


def _cut(tokenizer: PreTrainedTokenizerBase, ids: npt.NDArray[np.int32], labels: npt.NDArray[np.int32]) -> list[dict[str, Any]]:
    trained = np.concatenate([[False], labels[:-1] != IGNORE])
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1), len(ids)]
    # Prefixes instead of pieces: some tokenizers drop the space in front of what they decode.
    texts = ["", *(_decode(tokenizer, ids[:edge]) for edge in edges[1:])]
    return [
        {"text": text[len(before) :], "trained": bool(trained[start])}
        for before, text, start in zip(texts[:-1], texts[1:], edges[:-1], strict=True)
    ]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: npt.NDArray[np.int32]) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
