"""Stand-in trainers: small scripts in place of torchrun, under the real shim."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.launch.backend import Plan, Seen
from posttrain_service.launch.local import LocalBackend
from posttrain_service.launch.plan import job_environment
from posttrain_trainer.contract import proc
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, read_json


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait for something that another process does; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


@dataclass
class Run:
    """One run on the local backend."""

    backend: LocalBackend
    run_dir: RunDir

    @property
    def run_id(self) -> str:
        return self.run_dir.path.name

    def attempt(self, number: int = 1) -> AttemptDir:
        return self.run_dir.attempt(number)

    def plan(self, code: str, *args: str, attempt: int = 1, grace_s: float = 20.0) -> Plan:
        folder = self.attempt(attempt).path
        return Plan(
            argv=[sys.executable, "-c", code, *args],
            env=job_environment(os.environ, run_id=self.run_id, attempt=attempt),
            cwd=folder,
            attempt_dir=folder,
            run_id=self.run_id,
            attempt=attempt,
            grace_s=grace_s,
            arguments={"contract": 1},
        )

    def start(self, code: str, *args: str, attempt: int = 1, grace_s: float = 20.0) -> None:
        self.backend.start(self.plan(code, *args, attempt=attempt, grace_s=grace_s))

    def look(self, attempt: int = 1) -> Seen:
        return self.backend.look(self.run_dir, attempt)

    def exit(self, attempt: int = 1) -> dict[str, Any]:
        """The attempt's exit.json, waited for until the shim is gone too."""
        return until(lambda: self.look(attempt).exit)

    def saw(self, text: str, attempt: int = 1) -> None:
        """Wait until the stand-in has printed `text`."""
        log = self.attempt(attempt).torchrun_log
        until(lambda: log.exists() and text.encode() in log.read_bytes())

    def shim(self, attempt: int = 1) -> proc.Identity:
        identity = proc.Identity.from_json(until(lambda: read_json(self.attempt(attempt).run))["shim"])
        assert identity is not None
        return identity

    def launcher(self, attempt: int = 1) -> proc.Identity:
        record = until(lambda: (r := read_json(self.attempt(attempt).run)) and r["torchrun"] and r)
        identity = proc.Identity.from_json(record["torchrun"])
        assert identity is not None
        return identity

    until = staticmethod(until)

    def alive(self, attempt: int | None = None) -> list[proc.Identity]:
        return proc.find(self.run_id, attempt)


@pytest.fixture
def backend() -> LocalBackend:
    return LocalBackend(trainer_python=Path(sys.executable), stop_grace_s=20.0)


@pytest.fixture
def run(tmp_path: Path, backend: LocalBackend) -> Iterator[Run]:
    folder = tmp_path / str(uuid.uuid4())
    folder.mkdir()
    run = Run(backend, RunDir(folder))
    yield run
    assert proc.kill_marked(run.run_id).left == ()
