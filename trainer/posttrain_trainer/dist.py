"""The ranks of a run as one object: who I am, sums over all, and the life of the process group.

A run of one rank is a World of size 1 that goes through the same code, so nothing above asks whether it is distributed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.device import Device

_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankFacts:
    """A rank's place, as torchrun's environment states it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @staticmethod
    def from_environment(environment: dict[str, str] | None = None) -> RankFacts:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; none of them set = the only rank.

        Raises:
            InvalidArguments: Some are set and others not, or one is no number: half an environment would
                silently train alone.
        """
        environment = dict(os.environ) if environment is None else environment
        given = {name: environment[name] for name in _ENVIRONMENT if name in environment}
        if not given:
            return RankFacts()
        missing = [name for name in _ENVIRONMENT if name not in given]
        if missing:
            raise InvalidArguments(f"the environment names {', '.join(given)} but not {', '.join(missing)}; start ranks by torchrun")
        try:
            return RankFacts(*(int(given[name]) for name in _ENVIRONMENT))
        except ValueError as error:
            raise InvalidArguments(f"a rank's environment holds no number: {given}") from error


class World:
    """The ranks of this run, between `open` and its end.

    Attributes:
        rank: This process's number over all hosts.
        local_rank: Its number on this host.
        world_size: Ranks over all hosts.
        local_world_size: Ranks on this host.
        device: This rank's device.
    """

    def __init__(self, facts: RankFacts, device: Device) -> None:
        self.rank = facts.rank
        self.local_rank = facts.local_rank
        self.world_size = facts.world_size
        self.local_world_size = facts.local_world_size
        self.device = device
        self._meshes: dict[bool, DeviceMesh] = {}

    @staticmethod
    @contextmanager
    def open(device: Device, *, facts: RankFacts | None = None, timeout_s: float = 7200.0) -> Iterator[World]:
        """The process group's lifetime; it is torn down at the end, whatever happened.

        Args:
            device: This rank's device, already active.
            facts: This rank's place; None = from the environment.
            timeout_s: Longest that a rank waits for the others, e.g. while rank 0 prepares data. A rank that dies
                is noticed by torchrun, not by this.
        """
        facts = facts or RankFacts.from_environment()
        timeout = timedelta(seconds=timeout_s)
        if facts.world_size == 1:
            # No port, no address: a world of one meets itself in memory.
            distributed.init_process_group(device.backend, store=distributed.HashStore(),  # type: ignore[attr-defined]
                rank=0, world_size=1, timeout=timeout)
        else:
            distributed.init_process_group(device.backend, rank=facts.rank, world_size=facts.world_size, timeout=timeout)
        try:
            yield World(facts, device)
        finally:
            distributed.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.rank == 0

    def mesh(self, *, replicate: bool = False) -> DeviceMesh:
        """The ranks as a mesh: one axis to shard over, or `replicate` = every rank a whole copy (shard axis of size 1)."""
        if replicate not in self._meshes:
            if replicate:
                shape, names = (self.world_size, 1), ("replicate", "shard")
                self._meshes[replicate] = init_device_mesh(self.device.kind, shape, mesh_dim_names=names)
            else:
                self._meshes[replicate] = init_device_mesh(self.device.kind, (self.world_size,), mesh_dim_names=("shard",))
        return self._meshes[replicate]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks in float64; every rank gives as many values."""
        total = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether any rank's flag is set; the same answer on every rank."""
        return self.sum([float(flag)])[0] > 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON-like value, on every rank; what others pass in is ignored.

        It goes through JSON on rank 0 too (tuples become lists), so that all ranks see the same.
        """
        data = json.dumps(value).encode() if self.is_main else b""
        size = torch.tensor([len(data)], dtype=torch.int64)
        distributed.broadcast(size, src=0)
        content = torch.zeros(int(size.item()), dtype=torch.uint8)
        if self.is_main:
            content = torch.tensor(list(data), dtype=torch.uint8)
        distributed.broadcast(content, src=0)
        return json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])
