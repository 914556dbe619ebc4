"""Samples of several documents: pairs of answers, and blocks of text. The documents lie in an ordinary `Dataset`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain_trainer.contract.errors import InvalidData
from posttrain_trainer.data.batch import Group
from posttrain_trainer.data.cache import Dataset, held_out

Bounds = npt.NDArray[np.int64]


class Groups:
    """Samples by number, each of documents that follow each other; all that trains on a `Dataset` trains on this.

    Args:
        documents: The documents.
        bounds: Sample n is the documents from bounds[n] up to bounds[n + 1], which is not among them; [N + 1].
        members: Which of the samples there are; None = all.
        reference: For pairs: the reference's log-probabilities of chosen and rejected, fp32 [N, 2] over all samples.
    """

    def __init__(
        self, documents: Dataset, bounds: Bounds, members: Bounds | None = None, reference: npt.NDArray[np.float32] | None = None
    ) -> None:
        self._documents, self._bounds = documents, bounds
        self._members = np.arange(len(bounds) - 1) if members is None else members
        self.reference = reference
        first = bounds[:-1]
        self.lengths: npt.NDArray[np.int32] = _sums(documents.lengths, first)[self._members]
        """Tokens of each sample."""
        self.supervised: npt.NDArray[np.int32] = _sums(documents.supervised, first)[self._members]
        """Labels of each sample."""
        longest = np.maximum.reduceat(documents.lengths, first) if len(first) else documents.lengths[:0]
        self.padded_lengths: npt.NDArray[np.int32] = (np.diff(bounds).astype(np.int32) * longest)[self._members]
        """Room of each sample where each of its documents is a row, padded to its longest."""
        self.key = documents.key
        self.report: dict[str, Any] = documents.report | {
            "samples": len(self),
            "tokens": int(self.lengths.sum(dtype=np.int64)),
            "supervised_tokens": int(self.supervised.sum(dtype=np.int64)),
        }

    def __len__(self) -> int:
        return len(self._members)

    def sample(self, number: int) -> Group:
        """The documents of a sample, and for pairs their reference where it is known."""
        place = int(self._members[number])
        documents = tuple(self._documents.sample(n) for n in range(int(self._bounds[place]), int(self._bounds[place + 1])))
        return Group(documents, None if self.reference is None else self.reference[place])

    def with_reference(self, reference: npt.NDArray[np.float32]) -> Groups:
        """The same pairs, whose reference is known: [N, 2] over all samples."""
        return Groups(self._documents, self._bounds, self._members, reference)

    def split(self, share: float, seed: int) -> tuple[Groups, Groups]:
        """Hold a share of the samples out; see `Dataset.split`.

        Raises:
            InvalidData: There are too few samples for two parts.
        """
        held = held_out(len(self), share, seed)
        parts = [Groups(self._documents, self._bounds, self._members[chosen], self.reference) for chosen in (~held, held)]
        return parts[0], parts[1]


def pairs(documents: Dataset) -> Groups:
    """Pairs of answers: chosen and rejected take turns."""
    return Groups(documents, np.arange(0, len(documents) + 1, 2))


def blocks(documents: Dataset, size: int) -> Groups:
    """Blocks of `size` tokens, of the pieces that `tokenise.cut` made for them; the last one may be shorter.

    Raises:
        InvalidData: Nothing can be learned: a single token.
    """
    ends = np.cumsum(documents.lengths, dtype=np.int64)
    closed = np.flatnonzero(ends % size == 0) + 1
    bounds = np.concatenate([[0], closed, [len(ends)] if not len(closed) or closed[-1] != len(ends) else []]).astype(np.int64)
    found = Groups(documents, bounds)
    learned = np.flatnonzero(found.supervised > 0)  # a last block of a single token predicts nothing
    if not len(learned):
        raise InvalidData("the documents leave nothing to learn: a single token")
    return found if len(learned) == len(found) else Groups(documents, bounds, learned)


def _sums(values: npt.NDArray[np.int32], first: Bounds) -> npt.NDArray[np.int32]:
    return np.add.reduceat(values, first).astype(np.int32) if len(first) else values[:0]
