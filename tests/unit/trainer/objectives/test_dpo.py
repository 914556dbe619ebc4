"""The objective on a tiny model: packs, padding and lone pairs agree; every way to the reference gives the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from posttrain_trainer.contract.methods import DpoMethod
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.batch import Group, collate
from posttrain_trainer.device import Device
from posttrain_trainer.dist import RankFacts, World
from posttrain_trainer.models.load import load_model
from posttrain_trainer.objectives.dpo import Dpo, log_probabilities
from posttrain_trainer.objectives.reference import Reference
from posttrain_trainer.testing import tiny_model, whole

LENGTHS = ((20, 31), (9, 5), (40, 12))  # chosen and rejected of each pair; the second half of each is learned
LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def device() -> Device:
    return Device.pick("cpu")


@pytest.fixture(scope="module")
def world(device) -> Iterator[World]:
    with World.open(device, facts=RankFacts()) as opened:
        yield opened


@pytest.fixture(scope="module")
def load(tiny, device, world):
    def make(**changes):
        args = FullTrainingArguments(model_path=str(tiny), data_path="d", ckpt_output_dir="o", dtype="fp32", **changes)
        return args, load_model(args, device, world)

    return make


def document(generator, length):
    ids = generator.integers(4, 400, length, dtype=np.int32)
    labels = np.append(ids[1:], -100).astype(np.int32)
    labels[: length // 2] = -100
    return ids, labels


def pairs(reference=True):
    generator = np.random.default_rng(5)
    made = []
    for number, (chosen, rejected) in enumerate(LENGTHS):
        known = np.array([-90.0 - number, -80.0], dtype=np.float32) if reference else None
        made.append(Group((document(generator, chosen), document(generator, rejected)), known))
    return made


def step(objective, model, batches):
    """Loss, right guesses, rewards and gradients of one step over these micro-batches."""
    model.module.zero_grad()
    objective.before_step(model, batches)
    count = sum(objective.count(batch) for batch in batches)
    results = []
    for number, batch in enumerate(batches):
        model.set_sync(number == len(batches) - 1)
        results.append(objective(model, batch))
        (results[-1].loss_sum / count).backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.module.named_parameters() if p.grad is not None}
    sums = [sum(r.loss_sum.item() for r in results) / count, sum(int(r.num_correct) for r in results), sum(r.extra for r in results)]
    return sums, gradients


@pytest.mark.parametrize("loss_type", LOSSES)
def test_packed_padded_and_alone_are_the_same_step(load, world, loss_type):
    _, model = load()
    objective = Dpo(DpoMethod(kind="dpo", loss_type=loss_type, beta=0.05), world)
    packed = step(objective, model, [collate(pairs(), packed=True, pad_id=2)])
    padded = step(objective, model, [collate(pairs(), packed=False, pad_id=2)])
    alone = step(objective, model, [collate([pair], packed=True, pad_id=2) for pair in pairs()] + [collate([], packed=True, pad_id=2)])
    assert any(gradient.abs().max() > 1e-6 for gradient in packed[1].values())
    for other in (padded, alone):
        assert other[0][0] == pytest.approx(packed[0][0], rel=1e-4)
        assert other[0][1] == packed[0][1]
        torch.testing.assert_close(other[0][2], packed[0][2], rtol=1e-4, atol=1e-4)
        for name, gradient in packed[1].items():
            torch.testing.assert_close(other[1][name], gradient, rtol=1e-3, atol=1e-5)


def test_log_probabilities_are_those_of_plain_transformers(load):
    _, model = load()
    batch = collate(pairs(), packed=True, pad_id=2)
    found = log_probabilities(model, batch)
    flat = [part for pair in pairs() for part in pair.documents]
    for value, (ids, labels) in zip(found.tolist(), flat, strict=True):
        with torch.no_grad():
            logits = model.module.causal(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False, document_lengths=None).logits[0]
        learned = labels != -100
        target = torch.from_numpy(labels[learned].astype(np.int64))
        expected = logits[torch.from_numpy(learned)].log_softmax(-1).gather(1, target[:, None]).sum()
        assert value == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "kto_pair"])
def test_a_reference_from_disk_is_the_model_without_its_adapter(load, world, tmp_path, loss_type):
    method = {"kind": "dpo", "loss_type": loss_type}
    args, model = load(lora={"rank": 4}, method=method)
    told: list[str] = []
    reference = Reference(args, model, world, 128, tmp_path, tell=told.append, beat=lambda: told.append("beat"))
    known = reference.add(Stored())
    assert told == ["computing the reference's log-probabilities of 3 pairs", "beat"]
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:  # as if it had been trained
                parameter.copy_(torch.ones_like(parameter) * 0.02)
    batch = collate([known.sample(n) for n in range(3)], packed=True, pad_id=2)
    without = collate(pairs(reference=False), packed=True, pad_id=2)
    precomputed = step(Dpo(DpoMethod(**method), world), model, [batch])
    in_passing = step(Dpo(DpoMethod(**method, precompute_reference=False), world), model, [without])
    assert precomputed[0][0] == pytest.approx(in_passing[0][0], rel=1e-5)
    assert set(precomputed[1]) == set(in_passing[1])
    assert all("lora_" in name for name in precomputed[1])
    for name, gradient in precomputed[1].items():
        torch.testing.assert_close(in_passing[1][name], gradient, rtol=1e-4, atol=1e-6)
    free = step(Dpo(DpoMethod(**method, reference_free=True), world), model, [batch])
    assert free[0][0] != pytest.approx(precomputed[0][0], rel=1e-3)


class Stored:
    """Pairs as `Groups` has them, without a file."""

    key = "tokens-1"

    def __init__(self, reference=None):
        self.reference = reference
        self.lengths = self.padded_lengths = np.array([sum(pair) for pair in LENGTHS], dtype=np.int32)

    def __len__(self):
        return 3

    def sample(self, number):
        return Group(pairs()[number].documents, None if self.reference is None else self.reference[number])

    def with_reference(self, reference):
        return Stored(reference)


def test_the_reference_is_kept_by_content(load, world, tmp_path):
    method = {"kind": "dpo"}
    args, model = load(method=method)

    def values(stored, path=tmp_path, arguments=args):
        told = []
        found = Reference(arguments, model, world, 128, path, tell=told.append, beat=lambda: None).add(stored)
        return found.reference, bool(told)

    first, computed = values(Stored())
    assert computed
    again, computed = values(Stored())
    assert (again.tolist(), computed) == (first.tolist(), False)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])  # cut short by a full disk, say
    repaired, computed = values(Stored())
    assert (repaired.tolist(), computed) == (first.tolist(), True)
    other = Stored()
    other.key = "tokens-2"
    assert values(other)[1]
    assert values(Stored(), arguments=args.model_copy(update={"master_weights": False}))[1]
    assert len(list(tmp_path.iterdir())) == 3
    # Other numbers of the loss, or another place for results, need no other reference.
    free = args.model_copy(update={"method": DpoMethod(kind="dpo", beta=0.7), "learning_rate": 1.0})
    assert not values(Stored(), arguments=free)[1]
