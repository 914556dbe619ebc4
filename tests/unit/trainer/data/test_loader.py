"""Steps: every sample once an epoch, the same global order for any number of ranks, exact going on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_trainer.contract.errors import CheckpointInvalid, InvalidArguments
from posttrain_trainer.data.batch import IGNORE
from posttrain_trainer.data.loader import StepLoader, validation_batches

torch.set_num_threads(1)
CAPACITY = 64


class Samples:
    """Sample `i` is the token 1000 + i, repeated; all but its first two tokens are learned."""

    def __init__(self, count=64, seed=0):
        self.lengths = np.random.default_rng(seed).integers(3, 30, count).astype(np.int32)
        self.padded_lengths = self.lengths
        self.supervised = (self.lengths - 2).astype(np.int32)

    def __len__(self):
        return len(self.lengths)

    def sample(self, number):
        ids = np.full(self.lengths[number], 1000 + number, dtype=np.int32)
        labels = ids.copy()
        labels[[0, -1]] = IGNORE
        return ids, labels


def loader(dataset, **changes):
    options = {
        "effective_batch_size": 12, "max_batch_len": CAPACITY, "rank": 0, "world_size": 1, "seed": 7, "shuffle": True,
        "num_epochs": 2, "packed": True, "pad_id": 0,
    }  # fmt: skip
    return StepLoader(dataset, **options | changes)


def seen(batches):
    """Numbers of the samples in these micro-batches."""
    numbers = []
    for batch in batches:
        numbers += [int(i) - 1000 for i in batch.input_ids_BS[batch.position_ids_BS == 0] if i >= 1000]
    return numbers


def steps(dataset, world_size=1, **changes):
    """For each step the sorted sample numbers over all ranks, checked against the step's own counts."""
    out = []
    for ranks in zip(*(loader(dataset, rank=rank, world_size=world_size, **changes) for rank in range(world_size)), strict=True):
        assert len({len(step.micro_batches) for step in ranks}) == 1
        assert len({(step.num_samples, step.num_tokens, step.num_supervised, step.epoch) for step in ranks}) == 1
        batches = [batch for step in ranks for batch in step.micro_batches]
        assert sum(batch.num_samples for batch in batches) == ranks[0].num_samples
        assert sum(batch.num_tokens for batch in batches) == ranks[0].num_tokens
        assert sum(batch.num_supervised for batch in batches) == ranks[0].num_supervised
        assert sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches) == ranks[0].num_supervised
        assert all(batch.input_ids_BS.numel() <= CAPACITY for batch in batches)
        out.append(sorted(seen(batches)))
    return out


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_has_every_sample_once_and_keeps_the_last_short_step(packed, shuffle):
    dataset = Samples()
    made = steps(dataset, packed=packed, shuffle=shuffle)
    assert [len(step) for step in made] == [12, 12, 12, 12, 12, 4] * 2
    for epoch in (made[:6], made[6:]):
        assert sorted(number for step in epoch for number in step) == list(range(64))
    assert (made[:6] == made[6:]) == (not shuffle)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_do_not_change_what_a_step_is(packed, world_size):
    dataset = Samples()
    assert steps(dataset, world_size, packed=packed) == steps(dataset, packed=packed)


def test_another_seed_is_another_order():
    dataset = Samples()
    assert steps(dataset, seed=8) != steps(dataset) == steps(dataset)


def test_fewer_samples_than_ranks_run_without_data():
    dataset = Samples(3)
    ranks = [list(loader(dataset, rank=rank, world_size=5, num_epochs=1)) for rank in range(5)]
    assert [len(rank) for rank in ranks] == [1] * 5
    idle = [rank[0].micro_batches for rank in ranks if rank[0].micro_batches[0].num_samples == 0]
    assert len(idle) == 2
    for (batch,) in idle:
        assert (batch.labels_BS == IGNORE).all()
        assert batch.num_supervised == 0


def test_counts_of_steps_and_epochs():
    dataset = Samples()
    assert (loader(dataset).steps_per_epoch, loader(dataset).total_steps) == (6, 12)
    short = loader(dataset, max_steps_per_epoch=4, max_steps=7)
    assert (short.steps_per_epoch, short.total_steps) == (4, 7)
    assert [step.epoch for step in short] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75])
    epochs = [step.epoch for step in loader(dataset)]
    assert epochs[4:6] == [60 / 64, 1.0]
    assert epochs[-1] == 2.0
    assert loader(dataset, max_steps=10**6).total_steps == 12


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(deadline=None, max_examples=30)
def test_going_on_is_exact_at_any_step_and_with_any_ranks(stop, before, after, packed):
    dataset = Samples()
    whole = steps(dataset, packed=packed)
    first = loader(dataset, world_size=before, packed=packed)
    for _ in range(stop):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["samples_seen"] == sum(len(step) for step in whole[:stop])
    rest = [loader(dataset, rank=rank, world_size=after, packed=packed) for rank in range(after)]
    for each in rest:
        each.load_state_dict(state)
        assert each.state_dict() == state
    assert [sorted(seen([b for step in ranks for b in step.micro_batches])) for ranks in zip(*rest, strict=True)] == whole[stop:]


def test_going_on_gives_the_same_bits():
    dataset = Samples()
    whole = list(loader(dataset))
    again = loader(dataset)
    again.load_state_dict({**loader(dataset).state_dict(), "step": 3, "samples_seen": 36})
    for one, two in zip(again, whole[3:], strict=True):
        for a, b in zip(one.micro_batches, two.micro_batches, strict=True):
            assert torch.equal(a.input_ids_BS, b.input_ids_BS)
            assert torch.equal(a.labels_BS, b.labels_BS)


@pytest.mark.parametrize("change", [{"seed": 8}, {"shuffle": False}, {"effective_batch_size": 6}, {"max_steps_per_epoch": 2}])
def test_a_position_of_another_order_is_refused(change):
    dataset = Samples()
    with pytest.raises(CheckpointInvalid, match="the checkpoint's place in the data is for"):
        loader(dataset, **change).load_state_dict(loader(dataset).state_dict())
    with pytest.raises(CheckpointInvalid, match="num_samples 64, but it is 65 now"):
        loader(Samples(65)).load_state_dict(loader(dataset).state_dict())
    with pytest.raises(CheckpointInvalid, match="contradicts itself"):
        loader(dataset).load_state_dict({**loader(dataset).state_dict(), "samples_seen": 5})


def test_samples_that_fit_no_micro_batch_are_refused_at_once():
    with pytest.raises(InvalidArguments, match="raise max_batch_len"):
        loader(Samples(), max_batch_len=10)
    with pytest.raises(InvalidArguments, match="empty"):
        loader(Samples(0))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_validation_sees_everything_once(packed, world_size):
    dataset = Samples()
    ranks = [
        validation_batches(dataset, max_batch_len=CAPACITY, rank=rank, world_size=world_size, packed=packed, pad_id=0) for rank in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(seen([batch for rank in ranks for batch in rank])) == list(range(64))
    assert sum(batch.num_supervised for rank in ranks for batch in rank) == int(dataset.supervised.sum())
    assert [batch.lengths for batch in ranks[0][1:]] == [batch.lengths for batch in ranks[0]][1:]


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_a_limited_validation_is_a_fair_part(limit):
    dataset = Samples()
    ranks = [
        validation_batches(dataset, max_batch_len=CAPACITY, rank=rank, world_size=2, packed=True, pad_id=0, max_batches=limit) for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1]) <= limit
    numbers = seen([batch for rank in ranks for batch in rank])
    assert len(set(numbers)) == len(numbers)
    if limit == 5:
        assert len(numbers) > 30
        assert abs(dataset.lengths[numbers].mean() - dataset.lengths.mean()) < 3
