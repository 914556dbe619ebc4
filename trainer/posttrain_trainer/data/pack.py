"""Packing samples into micro-batches: pure functions of lengths, deterministic, no torch.

Every rank computes the same plan from the same lengths, so nothing has to be agreed on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Plan = list[list[Indices]]
"""[rank][micro-batch] -> numbers of the samples in it; equally many micro-batches on every rank, some may be empty."""

_ATTENTION_TOKENS = 16384.0
"""Length at which a document's attention costs as much as all its matrix multiplications (a mid-sized transformer)."""


def pack(lengths: npt.ArrayLike, capacity: int) -> tuple[Indices, int]:
    """Best-fit decreasing: each sample, longest first, goes where the least room is left over.

    At most 11/9 of the fewest bins, plus one (Johnson 1973; Dosa 2007, doi:10.1007/978-3-540-74450-4_1). Samples of one
    length are placed together, so a million samples take as many steps as there are different lengths and fill levels.

    Args:
        lengths: Length of each sample in tokens, [N], from 1 to `capacity`.
        capacity: Most tokens in a bin.

    Returns:
        The bin of each sample ([N], bins counted from 0) and the number of bins.

    Raises:
        ValueError: A sample is empty or longer than `capacity`; it would be lost.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(f"lengths from {sizes.min()} to {sizes.max()} do not fit bins of {capacity} tokens; shorten or drop the sample")
    # NumPy sorts 16-bit keys by radix, ten times faster.
    room_left = (capacity - sizes).astype(np.uint16 if capacity < 2**16 else np.int64)
    order = np.argsort(room_left, kind="stable")
    values, starts = np.unique(-sizes[order], return_index=True)
    bounds = [*starts.tolist(), sizes.size]
    placed = np.empty(sizes.size, dtype=np.int64)
    room = _Room(capacity)
    for value, begin, end in zip((-values).tolist(), bounds[:-1], bounds[1:], strict=True):
        room.place(value, placed[begin:end])
    bins = np.empty_like(placed)
    bins[order] = placed
    return bins, room.num_bins


class _Room:
    """Open bins by the room they have left."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._levels: list[int] = []  # ascending, those of _bins
        self._bins: dict[int, list[Indices]] = {}
        self.num_bins = 0

    def place(self, size: int, out: Indices) -> None:
        """Put `len(out)` samples of one size into the fullest bins that take them; write each one's bin to `out`."""
        done = 0
        while done < len(out):
            at = bisect_left(self._levels, size)
            level = self._levels[at] if at < len(self._levels) else self._capacity
            each = level // size
            wanted = -(-(len(out) - done) // each)
            bins = self._take(at, level, wanted) if at < len(self._levels) else self._open(wanted)
            count = min(len(bins) * each, len(out) - done)
            out[done : done + count] = np.repeat(bins, each)[:count]
            whole, rest = divmod(count, each)
            self._put(level - each * size, bins[:whole])
            if rest:
                self._put(level - rest * size, bins[whole:])
            done += count

    def _open(self, count: int) -> Indices:
        self.num_bins += count
        return np.arange(self.num_bins - count, self.num_bins, dtype=np.int64)

    def _take(self, at: int, level: int, count: int) -> Indices:
        stacked = self._bins[level]
        bins = stacked[0] if len(stacked) == 1 else np.concatenate(stacked)
        if count < len(bins):
            self._bins[level] = [bins[count:]]
        else:
            del self._bins[level]
            del self._levels[at]
        return bins[:count]

    def _put(self, level: int, bins: Indices) -> None:
        if not len(bins) or not level:
            return
        if level not in self._bins:
            insort(self._levels, level)
            self._bins[level] = []
        self._bins[level].append(bins)


def cost(lengths: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Relative time that documents of these lengths take: linear layers, and attention, which grows with the square."""
    sizes = lengths.astype(np.float64)
    return sizes + sizes * sizes / _ATTENTION_TOKENS


def plan_packed(lengths: npt.NDArray[Any], capacity: int, ranks: int) -> Plan:
    """Spread the samples of one step over ranks and micro-batches of at most `capacity` tokens.

    As few micro-batches per rank as best-fit decreasing needs; within that number their costs are evened out, and
    those that ranks run at the same time are alike (every rank waits for the slowest).

    Args:
        lengths: Length of each sample of the step, [n].
        capacity: Most tokens in a micro-batch.
        ranks: Number of ranks.

    Raises:
        ValueError: As for `pack`.
    """
    bins, count = pack(lengths, capacity)
    slots = max(1, -(-count // ranks)) * ranks
    costs = cost(lengths)
    even = _even(lengths, costs, slots, capacity)
    groups = [np.flatnonzero(bins == number) for number in range(count)] if even is None else even
    return _deal(groups, costs, ranks, slots)


def plan_padded(lengths: npt.NDArray[Any], capacity: int, ranks: int) -> Plan:
    """The same for padded micro-batches: rows times the longest row is at most `capacity`.

    Raises:
        ValueError: A sample is longer than `capacity`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and sizes.max() > capacity:
        raise ValueError(f"a sample of {sizes.max()} tokens does not fit a micro-batch of {capacity}; shorten or drop it")
    order = np.argsort(-sizes, kind="stable")
    groups: list[Indices] = []
    at = 0
    while at < len(order):
        rows = max(1, capacity // int(sizes[order[at]]))
        groups.append(order[at : at + rows])
        at += rows
    slots = max(1, -(-len(groups) // ranks)) * ranks
    while len(groups) < slots and len(widest := max(groups, key=len, default=order[:0])) > 1:
        number = next(i for i, group in enumerate(groups) if group is widest)
        groups[number : number + 1] = [widest[: len(widest) // 2], widest[len(widest) // 2 :]]
    padded = np.zeros(len(sizes), dtype=np.int64)
    for group in groups:
        padded[group] = sizes[group].max()
    return _deal([np.sort(group) for group in groups], cost(padded), ranks, slots)


def _even(lengths: npt.NDArray[Any], costs: npt.NDArray[np.float64], slots: int, capacity: int) -> list[Indices] | None:
    """Costliest sample first into the cheapest slot (Graham 1969); None when one doesn't fit where it should go."""
    heap = [(0.0, slot) for slot in range(slots)]
    used = [0] * slots
    members: list[list[int]] = [[] for _ in range(slots)]
    for number in np.argsort(-costs, kind="stable").tolist():
        total, slot = heap[0]
        used[slot] += int(lengths[number])
        if used[slot] > capacity:
            return None
        members[slot].append(number)
        heapq.heapreplace(heap, (total + float(costs[number]), slot))
    return [np.sort(np.asarray(group, dtype=np.int64)) for group in members]


def _deal(groups: Sequence[Indices], costs: npt.NDArray[np.float64], ranks: int, slots: int) -> Plan:
    """Hand out micro-batches, costliest first, one to each rank in turn; who has had least gets the costliest."""
    full = [*groups, *[np.empty(0, dtype=np.int64)] * (slots - len(groups))]
    totals = [float(costs[group].sum()) for group in full]
    order = sorted(range(slots), key=lambda number: (-totals[number], number))
    plan: Plan = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for first in range(0, slots, ranks):
        takers = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for number, rank in zip(order[first : first + ranks], takers, strict=True):
            plan[rank].append(full[number])
            load[rank] += totals[number]
    return plan
