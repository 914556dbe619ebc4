"""The packer: nothing lost, nothing too long, close to the bound, the same every time, even over ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_trainer.data.pack import cost, pack, plan_packed, plan_padded

PLANS = [plan_packed, plan_padded]


def lognormal(count, capacity, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(5.0, 0.9, count).astype(np.int64), 1, capacity)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 60))
@settings(deadline=None)
def test_bins_hold_everything_once_and_nothing_too_long(lengths, capacity):
    bins, count = pack(lengths, capacity)
    used = np.bincount(bins, weights=lengths, minlength=count) if lengths else np.zeros(0)
    assert len(bins) == len(lengths)
    assert len(used) == count
    assert (used > 0).all()
    assert (used <= capacity).all()
    fewest = -(-sum(lengths) // capacity)
    assert fewest <= count <= 2 * fewest, "no two bins would fit into one"


def test_it_is_best_fit_decreasing_item_by_item():
    """The grouped placement gives the very bins that placing one by one gives."""
    lengths, capacity = lognormal(3000, 700), 700
    room: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fits = [(left, number) for number, left in enumerate(room) if left >= length]
        if fits:
            room[min(fits)[1]] -= length
        else:
            room.append(capacity - length)
    bins, count = pack(lengths, capacity)
    left = capacity - np.bincount(bins, weights=lengths, minlength=count)
    assert sorted(left.tolist()) == sorted(room)


@pytest.mark.parametrize("capacity", [2048, 8193, 65536, 100_000])
def test_a_million_lengths_within_half_a_percent_of_the_bound(capacity):
    lengths = lognormal(1_000_000, capacity)
    started = time.process_time()
    bins, count = pack(lengths, capacity)
    spent = time.process_time() - started
    assert count <= 1.005 * -(-int(lengths.sum()) // capacity)
    assert np.bincount(bins, weights=lengths).max() <= capacity
    assert spent < 10, "thousands of times what it takes is a change of its order of growth"


def test_samples_that_cannot_fit_are_refused():
    for bad in ([4, 2, 3, 1], [1, 0]):
        with pytest.raises(ValueError, match="do not fit bins of 3"):
            pack(bad, 3)
    with pytest.raises(ValueError, match="does not fit a micro-batch of 3"):
        plan_padded(np.array([4, 2]), 3, 1)
    for lengths, count in (([4, 2, 3, 1], 1), ([], 0)):
        bins, bins_used = pack(lengths, 8193)
        assert (bins.tolist(), bins_used) == ([0] * len(lengths), count)


@pytest.mark.parametrize("plan", PLANS)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5))
@settings(deadline=None)
def test_a_plan_gives_every_rank_equally_many_and_every_sample_once(plan, lengths, ranks):
    sizes = np.array(lengths, dtype=np.int32)
    made = plan(sizes, 50, ranks)
    assert len(made) == ranks
    assert len({len(batches) for batches in made}) == 1
    assert len(made[0]) >= 1
    groups = [group for batches in made for group in batches]
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        tokens = sizes[group].sum() if plan is plan_packed else sizes[group].max(initial=0) * len(group)
        assert tokens <= 50
    again = plan(sizes, 50, ranks)
    assert all((a == b).all() for one, two in zip(made, again, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("size", "ranks", "capacity"), [(32, 1, 2048), (32, 2, 2048), (64, 2, 4096), (128, 4, 2048), (512, 8, 8192)])
def test_steps_need_at_most_one_micro_batch_more_than_the_bound(size, ranks, capacity):
    lengths, uneven = lognormal(size * 60, capacity, seed=size), []
    for start in range(0, len(lengths), size):
        step = lengths[start : start + size]
        made = plan_packed(step, capacity, ranks)
        assert len(made[0]) <= -(-int(step.sum()) // (capacity * ranks)) + 1
        costs = [sum(cost(step[group]).sum() for group in batches) for batches in made]
        uneven.append(max(costs) / np.mean(costs) - 1)
    assert np.mean(uneven) < 0.06


def test_micro_batches_that_run_together_cost_alike():
    lengths = lognormal(256, 2048)
    made = plan_packed(lengths, 4096, 4)
    for together in zip(*made, strict=True):
        costs = [cost(lengths[group]).sum() for group in together]
        assert max(costs) < 1.1 * min(costs)


@pytest.mark.parametrize("plan", PLANS)
def test_fewer_samples_than_ranks(plan):
    made = plan(np.array([5, 9]), 10, 4)
    assert [len(batches) for batches in made] == [1, 1, 1, 1]
    assert sorted(len(batches[0]) for batches in made) == [0, 0, 1, 1]


def test_padded_rows_are_of_like_length_and_spread_over_ranks():
    made = plan_padded(np.array([10, 100, 11, 99]), 200, 2)
    assert [sorted(batches[0].tolist()) for batches in made] in ([[1, 3], [0, 2]], [[0, 2], [1, 3]])
    made = plan_padded(np.array([10] * 8), 200, 2)
    assert [len(batches[0]) for batches in made] == [4, 4]
