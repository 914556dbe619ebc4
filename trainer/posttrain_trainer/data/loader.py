"""Steps of micro-batches: which samples, in which order, on which rank; exact, reproducible, resumable.

Samples of a step are drawn first, from an order that depends on seed and epoch alone, then packed. So the order is the
same for any number of ranks, and a loader goes on anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from posttrain_trainer.contract.errors import CheckpointInvalid, InvalidArguments
from posttrain_trainer.data.batch import Batch, Group, Sample, collate
from posttrain_trainer.data.cache import order
from posttrain_trainer.data.pack import Indices, Plan, plan_packed, plan_padded


class Samples(Protocol):
    """What a loader draws from; `Dataset` and `Groups` are."""

    lengths: npt.NDArray[np.int32]
    padded_lengths: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.int32]

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample | Group:
        """Ids and shifted labels, of one document or of several."""
        ...


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step: this rank's micro-batches, and what the step is over all ranks."""

    micro_batches: list[Batch]
    """Equally many on every rank; a rank without data gets one without labels."""
    num_samples: int
    """Samples of the step, over all ranks."""
    num_tokens: int
    """Tokens of the step, over all ranks, padding not counted."""
    num_supervised: int
    """Labels of the step, over all ranks: what the loss is divided by."""
    epoch: float
    """Epochs done after this step."""


class StepLoader:
    """Iterates over the steps of a whole run.

    Args:
        dataset: What to draw from.
        effective_batch_size: Samples of a step over all ranks; the last step of an epoch may have fewer.
        max_batch_len: Most tokens (padding counted) of a micro-batch.
        rank: This rank.
        world_size: Number of ranks.
        seed: Of the orders.
        shuffle: A new order each epoch; False = the data set's own.
        num_epochs: Passes through the data.
        packed: Micro-batches without padding, or one row a sample.
        pad_id: Fills rows.
        max_steps_per_epoch: End each epoch early.
        max_steps: End the run early.

    Raises:
        InvalidArguments: A sample is longer than `max_batch_len`, or there are none.
    """

    def __init__(
        self, dataset: Samples, *, effective_batch_size: int, max_batch_len: int, rank: int, world_size: int, seed: int,
        shuffle: bool, num_epochs: int, packed: bool, pad_id: int, max_steps_per_epoch: int | None = None, max_steps: int | None = None,
    ) -> None:  # fmt: skip
        _check(_rooms(dataset, packed=packed), max_batch_len)
        self._dataset = dataset
        self._size = effective_batch_size
        self._capacity, self._rank, self._world_size = max_batch_len, rank, world_size
        self._seed, self._shuffle, self._packed, self._pad_id = seed, shuffle, packed, pad_id
        steps = -(-len(dataset) // effective_batch_size)
        self.steps_per_epoch = steps if max_steps_per_epoch is None else min(steps, max_steps_per_epoch)
        """Optimizer steps in an epoch."""
        self.total_steps = self.steps_per_epoch * num_epochs
        """Optimizer steps in the run."""
        if max_steps is not None:
            self.total_steps = min(self.total_steps, max_steps)
        self._samples_per_epoch = min(len(dataset), self.steps_per_epoch * effective_batch_size)
        self._step = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[StepBatches]:
        return self

    def __next__(self) -> StepBatches:
        """The next step.

        Raises:
            StopIteration: `total_steps` are done.
        """
        if self._step >= self.total_steps:
            raise StopIteration
        epoch, place = divmod(self._step, self.steps_per_epoch)
        chosen = self._epoch_order(epoch)[place * self._size : (place + 1) * self._size]
        lengths = self._dataset.lengths[chosen]
        plan = _plan(_rooms(self._dataset, packed=self._packed)[chosen], self._capacity, self._world_size, packed=self._packed)
        batches = [_collate(self._dataset, chosen[group], packed=self._packed, pad_id=self._pad_id) for group in plan[self._rank]]
        self._step += 1
        return StepBatches(
            micro_batches=batches,
            num_samples=len(chosen),
            num_tokens=int(lengths.sum(dtype=np.int64)),
            num_supervised=int(self._dataset.supervised[chosen].sum(dtype=np.int64)),
            epoch=self._samples_seen() / self._samples_per_epoch,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as JSON: after the last step that it gave out."""
        epoch, place = divmod(self._step, self.steps_per_epoch)
        return {"epoch": epoch, "step": place, "samples_seen": self._samples_seen(), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader, of any number of ranks, stood.

        Raises:
            CheckpointInvalid: The state is of other data or another order, so its position means nothing here.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise CheckpointInvalid(f"the checkpoint's place in the data is for {key} {state.get(key)}, but it is {mine} now")
        self._step = int(state["epoch"]) * self.steps_per_epoch + int(state["step"])
        if self._samples_seen() != state["samples_seen"]:
            raise CheckpointInvalid(f"the checkpoint's place in the data contradicts itself: {state}")

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed, "shuffle": self._shuffle, "num_samples": len(self._dataset),
            "effective_batch_size": self._size, "steps_per_epoch": self.steps_per_epoch,
        }  # fmt: skip

    def _samples_seen(self) -> int:
        epoch, place = divmod(self._step, self.steps_per_epoch)
        return epoch * self._samples_per_epoch + min(place * self._size, self._samples_per_epoch)

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            count = len(self._dataset)
            self._order = epoch, order(count, self._seed, epoch) if self._shuffle else np.arange(count)
        return self._order[1]


def validation_batches(
    dataset: Samples, *, max_batch_len: int, rank: int, world_size: int, packed: bool, pad_id: int, max_batches: int | None = None
) -> Sequence[Batch]:
    """The micro-batches of one rank for a whole data set, made when asked for; equally many on every rank.

    Args:
        dataset: The validation samples.
        max_batch_len: Most tokens (padding counted) of a micro-batch.
        rank: This rank.
        world_size: Number of ranks.
        packed: Without padding, or one row a sample.
        pad_id: Fills rows.
        max_batches: Most micro-batches per rank; then a fixed random part of the samples, not the longest ones.

    Raises:
        InvalidArguments: A sample is longer than `max_batch_len`, or there are none.
    """
    rooms = _rooms(dataset, packed=packed)
    _check(rooms, max_batch_len)
    chosen = order(len(dataset), seed=0, epoch=0)
    while True:
        plan = _plan(rooms[chosen], max_batch_len, world_size, packed=packed)
        if max_batches is None or len(plan[0]) <= max_batches:
            return _Lazy(dataset, [chosen[group] for group in plan[rank]], packed=packed, pad_id=pad_id)
        chosen = chosen[: max(1, min(len(chosen) - 1, len(chosen) * max_batches // len(plan[0])))]


class _Lazy(Sequence[Batch]):
    def __init__(self, dataset: Samples, groups: list[Indices], *, packed: bool, pad_id: int) -> None:
        self._dataset, self._groups, self._packed, self._pad_id = dataset, groups, packed, pad_id

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return _Lazy(self._dataset, self._groups[index], packed=self._packed, pad_id=self._pad_id)
        return _collate(self._dataset, self._groups[index], packed=self._packed, pad_id=self._pad_id)


def _rooms(dataset: Samples, *, packed: bool) -> npt.NDArray[np.int32]:
    """Tokens that each sample takes in a micro-batch."""
    return dataset.lengths if packed else dataset.padded_lengths


def _check(lengths: npt.NDArray[np.int32], max_batch_len: int) -> None:
    if not len(lengths):
        raise InvalidArguments("the data set is empty")
    if (longest := int(lengths.max())) > max_batch_len:
        raise InvalidArguments(f"max_batch_len is {max_batch_len}, but a sample has {longest} tokens; raise max_batch_len or lower max_seq_len")


def _plan(lengths: npt.NDArray[np.int32], capacity: int, ranks: int, *, packed: bool) -> Plan:
    return plan_packed(lengths, capacity, ranks) if packed else plan_padded(lengths, capacity, ranks)


def _collate(dataset: Samples, numbers: Indices, *, packed: bool, pad_id: int) -> Batch:
    return collate([dataset.sample(int(number)) for number in numbers], packed=packed, pad_id=pad_id)
