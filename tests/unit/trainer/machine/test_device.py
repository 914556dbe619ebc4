"""Picking a device and a precision, by a table of machines that this one is not."""

from __future__ import annotations

import pytest
import torch

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.device import Device, Machine

MILAN = Machine({}, frozenset(), 2)
SAPPHIRE = Machine({}, frozenset({"cpu"}), 64)
MAC = Machine({"mps": 1}, frozenset({"mps"}), 10)
V100 = Machine({"cuda": 4}, frozenset(), 32)
H100X8 = Machine({"cuda": 8}, frozenset({"cuda", "cpu"}), 192)
PVC = Machine({"xpu": 2}, frozenset({"xpu"}), 48)
GAUDI = Machine({"hpu": 8}, frozenset({"hpu"}), 96)


@pytest.mark.parametrize(
    ("machine", "name", "local_rank", "kind", "index", "backend", "dtype"),
    [
        (MILAN, "auto", 0, "cpu", None, "gloo", torch.float32),
        (MILAN, "auto", 1, "cpu", None, "gloo", torch.float32),
        (SAPPHIRE, "auto", 0, "cpu", None, "gloo", torch.bfloat16),
        (MAC, "auto", 0, "mps", None, "gloo", torch.bfloat16),
        (MAC, "cpu", 0, "cpu", None, "gloo", torch.float32),
        (V100, "auto", 3, "cuda", 3, "cpu:gloo,cuda:nccl", torch.float32),
        (H100X8, "auto", 7, "cuda", 7, "cpu:gloo,cuda:nccl", torch.bfloat16),
        (H100X8, "cpu", 0, "cpu", None, "gloo", torch.bfloat16),
        (PVC, "auto", 1, "xpu", 1, "cpu:gloo,xpu:xccl", torch.bfloat16),
        (GAUDI, "hpu", 2, "hpu", 2, "cpu:gloo,hpu:hccl", torch.bfloat16),
    ],
)
def test_pick(machine, name, local_rank, kind, index, backend, dtype):
    device = Device.pick(name, local_rank=local_rank, machine=machine)
    assert (device.kind, device.index, device.backend) == (kind, index, backend)
    assert device.resolve_dtype("auto") == dtype
    assert device.resolve_dtype("fp32") == torch.float32
    assert device.resolve_dtype("bf16") == torch.bfloat16
    assert device.can_shard == (kind != "mps")


@pytest.mark.parametrize(
    ("machine", "name", "local_rank", "sentence"),
    [
        (MILAN, "cuda", 0, "device cuda is not available"),
        (MILAN, "tpu", 0, "device 'tpu' is unknown"),
        (H100X8, "mps", 0, "device mps is not available"),
        (V100, "auto", 4, "lower nproc_per_node to 4"),
        (MAC, "auto", 1, "lower nproc_per_node to 1"),
    ],
)
def test_pick_refuses(machine, name, local_rank, sentence):
    with pytest.raises(InvalidArguments, match=sentence):
        Device.pick(name, local_rank=local_rank, machine=machine)


@pytest.mark.parametrize("machine", [MILAN, H100X8])
def test_fp16_is_refused_by_name(machine):
    with pytest.raises(InvalidArguments, match="dtype fp16"):
        Device.pick("auto", machine=machine).resolve_dtype("fp16")


def test_look_reads_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "cpu_name": "x"})
    machine = Machine.look()
    assert machine.counts["cuda"] == 3
    assert {"cuda", "cpu"} <= machine.fast_bf16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "avx2": True})
    assert "cpu" not in Machine.look().fast_bf16


def test_threads_are_shared_among_ranks():
    before = torch.get_num_threads()
    try:
        Device.pick("cpu", machine=Machine({}, frozenset(), 8)).activate(local_world_size=4)
        assert torch.get_num_threads() == 2
        Device.pick("cpu", machine=Machine({}, frozenset(), 2)).activate(local_world_size=4)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_seed_repeats_and_deterministic_switches():
    device = Device.pick("cpu", machine=MILAN)
    try:
        device.seed(7, deterministic=True)
        first = torch.rand(3)
        assert torch.are_deterministic_algorithms_enabled()
        device.seed(7)
        assert torch.equal(first, torch.rand(3))
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_of_the_host():
    memory = Device.pick("cpu", machine=MILAN).memory()
    assert 0 <= memory.available_bytes <= memory.total_bytes
    assert 10 * 2**20 < memory.peak_bytes < memory.total_bytes
