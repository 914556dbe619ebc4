"""The ranks of a run as one object: who I am, sums over all, and the life of the process group.

A run of one rank is a World of size 1 that goes through the same code, so nothing above asks whether it is distributed.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from posttrain_trainer.contract.errors import InvalidArguments, TrainerError
from posttrain_trainer.device import Device
from posttrain_trainer.failures import as_trainer_error

T = TypeVar("T")

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
        group: Of its collectives; None = that of all ranks from the start.
        device: This rank's device.
    """

    def __init__(self, facts: RankFacts, device: Device) -> None:
        self.rank = facts.rank
        self.local_rank = facts.local_rank
        self.world_size = facts.world_size
        self.local_world_size = facts.local_world_size
        self.device = device
        self.group: distributed.ProcessGroup | None = None
        self._meshes: dict[int, DeviceMesh] = {}

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

    def mesh(self, shard_ranks: int | None = None) -> DeviceMesh:
        """The ranks as a mesh: one axis to shard over; or copies by `shard_ranks` neighbours that share each, 1 = every rank a copy."""
        size = shard_ranks or self.world_size
        if shard_ranks is None and 0 not in self._meshes:
            self._meshes[0] = init_device_mesh(self.device.kind, (size,), mesh_dim_names=("shard",))
        elif shard_ranks is not None and shard_ranks not in self._meshes:
            shape = (self.world_size // size, size)
            self._meshes[size] = init_device_mesh(self.device.kind, shape, mesh_dim_names=("replicate", "shard"))
        return self._meshes[shard_ranks or 0]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks in float64; every rank gives as many values."""
        total = torch.tensor(list(values), dtype=torch.float64)
        distributed.all_reduce(total, group=self.group)
        return [float(value) for value in total.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether any rank's flag is set; the same answer on every rank."""
        return self.sum([float(flag)])[0] > 0

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The JSON-like value of rank `source`, on every rank; what others pass in is ignored.

        It goes through JSON on that rank too (tuples become lists), so that all ranks see the same.
        """
        data = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(data)], dtype=torch.int64)
        distributed.broadcast(size, src=source, group=self.group)
        content = torch.zeros(int(size.item()), dtype=torch.uint8)
        if self.rank == source:
            content = torch.tensor(list(data), dtype=torch.uint8)
        distributed.broadcast(content, src=source, group=self.group)
        return json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])

    def together(self, act: Callable[[], T]) -> T:
        """Do `act` on every rank; where it fails on one, it fails on all, with the error of the lowest that failed.

        Args:
            act: May have collectives only if none of them is left waiting when it fails on one rank.

        Raises:
            Exception: This rank's own.
            TrainerError: That of another rank, in the contract's words.
        """
        own: Exception | None = None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001  the others wait to hear of it, whatever it is
            own = error
        failed = self.sum([float(own is not None and rank == self.rank) for rank in range(self.world_size)])
        if not any(failed):
            return result
        first = next(rank for rank, flag in enumerate(failed) if flag)
        told = self.broadcast(None if own is None else as_trainer_error(own, rank=self.rank).to_json(), source=first)
        raise TrainerError.from_json(told) if own is None else own

    def aside(self) -> World:
        """The same ranks with a group of their own on the hosts, for collectives of another thread; all ranks call it."""
        twin = copy.copy(self)
        twin.group = distributed.new_group(backend="gloo")
        return twin

    def main_alone(self) -> distributed.ProcessGroup:
        """A group that has rank 0 only, for what wants a group and is done by that rank; all ranks call it."""
        group: distributed.ProcessGroup = distributed.new_group([0], backend="gloo")
        return group
