"""Real ranks under the service's shim: a cancel in time, and ends of which no rank can tell."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.launch.backend import Seen
from posttrain_service.launch.local import LocalBackend
from posttrain_trainer.contract import proc
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.spec import TorchrunArguments

from .conftest import Lab, steps_done, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CANCEL_S = 2.0


class Run:
    """One attempt that trains until somebody ends it."""

    def __init__(self, lab: Lab, folder: Path, ranks: int) -> None:
        self.backend = LocalBackend(trainer_python=Path(sys.executable), stop_grace_s=30.0)
        self.run_dir = RunDir(folder / str(uuid.uuid4()))
        self.attempt = self.run_dir.attempt(1)
        args, torch_args = lab.args(self.run_dir.path, num_epochs=5000), TorchrunArguments(nproc_per_node=ranks)
        slots = [f"cpu:{rank}" for rank in range(ranks)]
        self.backend.start(self.backend.plan(self.run_dir.path.name, 1, self.run_dir, args, torch_args, slots))
        wait_for(lambda: steps_done(self.attempt) >= 2, "the second step")

    def alive(self) -> list[proc.Identity]:
        return proc.find(self.run_dir.path.name)

    def ended(self) -> Seen:
        wait_for(lambda: self.backend.look(self.run_dir, 1).exit, "the end")
        return self.backend.look(self.run_dir, 1)

    def rank(self, number: int) -> proc.Identity:
        marked = (i for i in self.alive() if f"RANK={number}".encode() in Path(f"/proc/{i.pid}/environ").read_bytes().split(b"\0"))
        return next(marked)


@pytest.fixture
def start(lab: Lab, tmp_path: Path) -> Iterator[Callable[[int], Run]]:
    made: list[Any] = []

    def start(ranks: int) -> Run:
        made.append(Run(lab, tmp_path, ranks))
        return made[-1]

    yield start
    for run in made:
        assert proc.kill_marked(run.run_dir.path.name).left == ()


def test_a_cancel_of_two_ranks_leaves_no_process_within_two_seconds(start: Callable[[int], Run]) -> None:
    run = start(2)
    run.backend.stop(run.run_dir, 1, "cancel")
    seen = run.ended()
    assert run.alive() == []
    assert seen.exit is not None
    assert (seen.exit["reason"], seen.exit["stop_want"]) == ("stopped", "cancel")
    assert seen.result is not None
    assert seen.result["want"] == "cancel"
    # The bound is for a machine that has a core for each rank.
    assert seen.exit["stop_took_s"] <= CANCEL_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_a_single_rank_that_was_killed_is_lost(start: Callable[[int], Run]) -> None:
    run = start(1)
    assert proc.send(run.rank(0), signal.SIGKILL)
    seen = run.ended()
    assert seen.error is not None
    assert (seen.error["code"], seen.error["rank"], seen.error["exit_code"]) == ("lost", 0, -signal.SIGKILL)


def test_ranks_follow_a_killed_shim_without_any_server(start: Callable[[int], Run]) -> None:
    run = start(2)
    [shim] = [i for i in run.alive() if "shim.py" in Path(f"/proc/{i.pid}/cmdline").read_text()]
    assert proc.send(shim, signal.SIGKILL)
    wait_for(lambda: run.alive() == [], "the end of all ranks", timeout_s=60)
