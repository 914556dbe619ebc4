"""The one place that names devices: CPU, MPS, CUDA and ROCm, XPU, HPU behind one small class.

Picks a device, its collective backend and precision; knows its memory, seeds, threads and how to wait for it. What a
machine has is read once into a `Machine`, so that every decision is a pure function of it.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from posttrain_trainer.contract.errors import InvalidArguments

_ORDER = ("cuda", "xpu", "hpu", "mps")
_BACKENDS = {"cpu": "gloo", "mps": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "hpu": "cpu:gloo,hpu:hccl"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Machine:
    """What this host offers, as far as picking a device asks."""

    counts: dict[str, int] = field(default_factory=dict)
    """Usable accelerators by kind; a kind that is absent has none."""
    fast_bf16: frozenset[str] = frozenset()
    """Kinds that multiply bf16 matrices in hardware."""
    cores: int = 1
    """CPU cores that this process may run on."""

    @staticmethod
    def look() -> Machine:
        """Read the facts from torch and the operating system."""
        counts = {
            "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "xpu": torch.xpu.device_count() if torch.xpu.is_available() else 0,
            "mps": int(torch.backends.mps.is_available()),
            "hpu": _hpu_count(),
        }
        fast = {kind for kind in ("xpu", "hpu", "mps") if counts[kind]}
        if counts["cuda"] and torch.cuda.is_bf16_supported(including_emulation=False):
            fast.add("cuda")
        if _cpu_has_bf16():
            fast.add("cpu")
        return Machine({kind: n for kind, n in counts.items() if n}, frozenset(fast), _usable_cores())


@dataclass(frozen=True)
class Memory:
    """Memory of one device in bytes (of the host, for the CPU)."""

    total_bytes: int
    available_bytes: int
    peak_bytes: int
    """Most that this process has used so far."""


@dataclass(frozen=True)
class Device:
    """One rank's device.

    Attributes:
        kind: cpu, cuda (also ROCm), mps, xpu or hpu.
        index: Number on this host; None where there is only one.
        backend: torch.distributed's backend; accelerators get gloo beside their own for values on the host.
        bf16_fast: Whether bf16 matrices are multiplied in hardware.
        cores: CPU cores that this process may run on.
    """

    kind: str
    index: int | None
    backend: str
    bf16_fast: bool
    cores: int

    @staticmethod
    def pick(name: str = "auto", *, local_rank: int = 0, machine: Machine | None = None) -> Device:
        """The device that `name` means for the rank `local_rank` of this host.

        Args:
            name: auto (first accelerator there is, else the CPU) or a kind.
            local_rank: The rank's number on this host, which is also its accelerator's.
            machine: What the host has; None = look.

        Raises:
            InvalidArguments: The kind is unknown or not there, or the host has fewer of it than ranks.
        """
        machine = machine or Machine.look()
        if name not in ("auto", "cpu", *_ORDER):
            raise InvalidArguments(f"device {name!r} is unknown; use one of auto, cpu, {', '.join(_ORDER)}")
        kind = next((kind for kind in _ORDER if machine.counts.get(kind)), "cpu") if name == "auto" else name
        count = machine.counts.get(kind, 0)
        if kind != "cpu" and not count:
            raise InvalidArguments(f"device {kind} is not available on this machine; use auto or cpu")
        if kind != "cpu" and local_rank >= count:
            raise InvalidArguments(
                f"rank {local_rank} of this host has no {kind} device of its own: there are {count}; "
                f"lower nproc_per_node to {count}"
            )
        index = local_rank if kind in ("cuda", "xpu", "hpu") else None
        return Device(kind, index, _BACKENDS[kind], kind in machine.fast_bf16, machine.cores)

    @property
    def torch_device(self) -> torch.device:
        """The device for tensors."""
        return torch.device(self.kind) if self.index is None else torch.device(self.kind, self.index)

    @property
    def can_shard(self) -> bool:
        """Whether FSDP2 runs here; MPS lacks what it needs and trains on one rank without it."""
        return self.kind != "mps"

    def resolve_dtype(self, name: str) -> torch.dtype:
        """The precision of the computation: auto = bf16 where it is fast, else fp32.

        Raises:
            InvalidArguments: fp16, whose gradients vanish without loss scaling, which this trainer does not do.
        """
        if name == "auto":
            return torch.bfloat16 if self.bf16_fast else torch.float32
        if name == "fp16":
            raise InvalidArguments(f"dtype fp16 cannot train on {self.kind}: it would need loss scaling; use bf16, fp32 or auto")
        return _DTYPES[name]

    def activate(self, local_world_size: int = 1) -> None:
        """Make this device the process's own and share the host's cores among its ranks; call once, before other work."""
        torch.set_num_threads(max(1, self.cores // local_world_size))
        if self.index is not None:
            self._module().set_device(self.index)

    def seed(self, seed: int, *, deterministic: bool = False) -> None:
        """Seed Python, numpy and torch on this device; `deterministic` also refuses kernels that vary between runs."""
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if deterministic:
            # cuBLAS reads this when its first handle is made.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)

    def synchronize(self) -> None:
        """Wait for all work queued on the device; nothing on the CPU."""
        if self.kind != "cpu":
            self._module().synchronize()

    def memory(self) -> Memory:
        """Total, available and peak memory."""
        if self.kind in ("cpu", "mps"):
            return host_memory()
        module = self._module()
        free, total = module.mem_get_info(self.index)
        return Memory(total_bytes=total, available_bytes=free, peak_bytes=module.max_memory_allocated(self.index))

    def _module(self) -> Any:
        return torch.get_device_module(self.kind)


def host_memory() -> Memory:
    """The host's memory, or the container's limit where that is less."""
    system = psutil.virtual_memory()
    total, available = system.total, system.available
    limit_file = Path("/sys/fs/cgroup/memory.max")
    if limit_file.exists() and (text := limit_file.read_text().strip()).isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total = min(total, int(text))
        available = max(0, min(available, int(text) - used))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Memory(total, available, peak if sys.platform == "darwin" else peak * 1024)


def _cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 dot products; without them bf16 is emulated and slower than fp32."""
    found = torch.cpu.get_capabilities()
    return any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16", "sve_bf16"))


def _hpu_count() -> int:
    hpu = getattr(torch, "hpu", None)
    return int(hpu.device_count()) if hpu is not None and hpu.is_available() else 0


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
