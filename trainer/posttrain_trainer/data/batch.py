"""One micro-batch of one rank, and how samples become one. A sample is one document, or a group of them.

Shapes: B rows, S tokens in a row. Packed: B = 1, documents one after another without padding. Padded: one document a
row, padding on the right, which causal attention never looks at from within the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE = -100
"""Label of a position where nothing is learned."""

Sample = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Token ids and shifted labels of one document, [L] each."""


class Group(NamedTuple):
    """A sample of several documents."""

    documents: tuple[Sample, ...]
    """For a pair: the chosen answer with its prompt, and the rejected one with the same."""
    reference: npt.NDArray[np.float32] | None
    """For a pair: the reference's log-probabilities of both, [2]; None where there are none yet."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    input_ids_BS: Tensor
    """int64."""
    labels_BS: Tensor
    """int64, already shifted: the token that each position has to predict, -100 where nothing is learned."""
    position_ids_BS: Tensor
    """int64, restarting at 0 for each document."""
    lengths: tuple[int, ...]
    """Packed: lengths of the documents, summing to S. Padded: valid length of each row."""
    packed: bool
    """Whether documents stand one after another in a single row."""
    num_tokens: int
    """Tokens, padding not counted; 0 on a rank without data."""
    num_supervised: int
    """Labels that are not -100."""
    num_samples: int
    """Samples; 0 on a rank without data, whose batch is one token without a label."""
    reference_P2: Tensor | None = None
    """For pairs: the reference's log-probabilities of chosen and rejected, fp32; None where there are none."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on another device."""
        return replace(
            self,
            input_ids_BS=self.input_ids_BS.to(device, non_blocking=True),
            labels_BS=self.labels_BS.to(device, non_blocking=True),
            position_ids_BS=self.position_ids_BS.to(device, non_blocking=True),
            reference_P2=None if self.reference_P2 is None else self.reference_P2.to(device, non_blocking=True),
        )

    def document_of_each(self) -> Tensor:
        """Number of the document that each position of the batch belongs to, int64 [B, S]."""
        device = self.input_ids_BS.device
        numbers = torch.arange(len(self.lengths), device=device)
        if self.packed:
            return numbers.repeat_interleave(torch.tensor(self.lengths, device=device))[None]
        return numbers[:, None].expand_as(self.input_ids_BS)


def collate(samples: Sequence[Sample | Group], *, packed: bool, pad_id: int) -> Batch:
    """A micro-batch of these samples; without any, one token that is not learned and counts for nothing.

    Args:
        samples: At least one token each.
        packed: One row without padding, or one row a document.
        pad_id: Fills rows on the right when not packed; may be a token that the samples hold, too.
    """
    if not samples:
        return _empty(packed=packed, pad_id=pad_id)
    documents = [document for sample in samples for document in (sample.documents if isinstance(sample, Group) else (sample,))]
    references = [sample.reference for sample in samples if isinstance(sample, Group) and sample.reference is not None]
    lengths = tuple(len(ids) for ids, _ in documents)
    if packed:
        ids = np.concatenate([ids for ids, _ in documents])[None]
        labels = np.concatenate([labels for _, labels in documents])[None]
        positions = np.concatenate([np.arange(length) for length in lengths])[None]
    else:
        shape = (len(documents), max(lengths))
        ids, labels = np.full(shape, pad_id, dtype=np.int32), np.full(shape, IGNORE, dtype=np.int32)
        for row, (sample_ids, sample_labels) in enumerate(documents):
            ids[row, : lengths[row]] = sample_ids
            labels[row, : lengths[row]] = sample_labels
        positions = np.broadcast_to(np.arange(shape[1]), shape)
    return Batch(
        input_ids_BS=torch.from_numpy(ids.astype(np.int64)),
        labels_BS=torch.from_numpy(labels.astype(np.int64)),
        position_ids_BS=torch.from_numpy(positions.astype(np.int64)),
        lengths=lengths,
        packed=packed,
        num_tokens=sum(lengths),
        num_supervised=int((labels != IGNORE).sum()),
        num_samples=len(samples),
        reference_P2=torch.from_numpy(np.stack(references)) if references else None,
    )


def _empty(*, packed: bool, pad_id: int) -> Batch:
    """What a rank without data runs, so that it takes part in every collective."""
    return Batch(
        input_ids_BS=torch.full((1, 1), pad_id, dtype=torch.int64),
        labels_BS=torch.full((1, 1), IGNORE, dtype=torch.int64),
        position_ids_BS=torch.zeros((1, 1), dtype=torch.int64),
        lengths=(1,),
        packed=packed,
        num_tokens=0,
        num_supervised=0,
        num_samples=0,
    )
