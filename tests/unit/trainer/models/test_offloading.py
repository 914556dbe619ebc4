"""Activations that wait in host memory: the same bits come back, and weights stay where they are."""

from __future__ import annotations

import pytest
import torch

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.device import Device
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models import memory
from posttrain_trainer.models.load import load_model
from posttrain_trainer.testing import whole


@pytest.fixture
def moved(monkeypatch):
    """As if this device's memory were not the host's; shapes of what came back from there."""
    back, unpack = [], memory._unpack

    def counting(kept):
        if isinstance(kept, tuple):
            back.append(tuple(kept[1].shape))
        return unpack(kept)

    monkeypatch.setattr(memory, "check_offloading", lambda _device: None)
    monkeypatch.setattr(memory, "_on_host", lambda _tensor: False)
    monkeypatch.setattr(memory, "_unpack", counting)
    return back


def gradients(args, device, world, batch):
    model = load_model(args, device, world)
    model.module(batch(200, 120), cross_entropy).loss_sum.backward()
    return {name: whole(p.grad) for name, p in model.module.named_parameters()}


@pytest.mark.parametrize(("changes", "inputs_alone"), [({}, False), ({"activation_checkpointing": True}, True), ({"dtype": "bf16"}, False)])
def test_gradients_are_the_same_to_the_bit(arguments, device, world, batch, moved, changes, inputs_alone):
    plain = gradients(arguments(**changes), device, world, batch)
    assert moved == []
    offloaded = gradients(arguments(**changes, activation_offloading=True), device, world, batch)
    assert plain.keys() == offloaded.keys()
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)
    assert (1, 320, 64) in moved
    if inputs_alone:
        assert moved.count((1, 320, 64)) == len(moved) == 2  # the input of each block
    assert not {tuple(tensor.shape) for tensor in plain.values()} & set(moved)


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_where_there_is_nothing_to_move_it_is_refused(kind):
    with pytest.raises(InvalidArguments, match=f"activation_offloading has no meaning on device {kind}"):
        memory.check_offloading(Device(kind, None, "gloo", True, 1))


def test_it_is_refused_before_anything_is_loaded(arguments, device, world):
    with pytest.raises(InvalidArguments, match="activation_offloading"):
        load_model(arguments(model_path="/nowhere", activation_offloading=True), device, world)
