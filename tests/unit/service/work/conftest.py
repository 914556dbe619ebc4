"""A service over a real database and a backend that only pretends to run things."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from posttrain_service.app import create_app
from posttrain_service.clock import ManualClock
from posttrain_service.compose import Runtime, build
from posttrain_service.domain.job import Job
from posttrain_service.errors import LaunchFailed, Unavailable
from posttrain_service.launch.backend import Liveness, Plan, Seen
from posttrain_service.settings import Settings
from posttrain_service.wire.jobs import JobRequest
from posttrain_trainer.contract.rundir import RunDir

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
DONE = {"status": "completed", "steps": 4, "total_steps": 4, "checkpoint": "step-000004"}


def request(**changes: Any) -> JobRequest:
    return JobRequest.model_validate({"model": "tiny", "dataset": {"rows": [GOOD]}} | changes)


@dataclass
class FakeBackend:
    """Attempts as the test says they are."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)
    fails: bool = False
    unkillable: bool = False

    def plan(self, run_id, attempt, run_dir, train_args, torch_args, devices):
        return Plan(["torchrun"], {"A": "b"}, run_dir.path, run_dir.attempt(attempt).path, run_id, attempt, 5.0,
                    {"train_args": train_args.model_dump(mode="json"), "torch_args": torch_args.model_dump(mode="json")})  # fmt: skip

    def start(self, plan: Plan) -> None:
        self.calls.append(("start", plan.run_id, plan.attempt))
        if self.fails:
            raise LaunchFailed("no shim today")
        self.seen.setdefault((plan.run_id, plan.attempt), Seen(Liveness.ALIVE, started=True))

    def look(self, run_dir: RunDir, attempt: int) -> Seen:
        return self.seen.get((run_dir.path.name, attempt), Seen(Liveness.DEAD))

    def stop(self, run_dir: RunDir, attempt: int, want: str, *, grace_s: float | None = None) -> None:
        self.calls.append(("stop", run_dir.path.name, attempt, want))

    def sweep(self, run_dir: RunDir, attempt: int) -> int:
        self.calls.append(("sweep", run_dir.path.name, attempt))
        if self.unkillable:
            raise Unavailable("still there", code="still_running")
        return 0

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


@dataclass
class Bench:
    """One service whose rounds the test makes itself."""

    runtime: Runtime
    backend: FakeBackend
    clock: ManualClock

    @property
    def jobs(self):
        return self.runtime.services.jobs

    def submit(self, **changes: Any) -> Job:
        self.clock.advance(0.001)  # so that the queue has an order
        return self.jobs.create(request(**changes))[0].job

    def job(self, job: Job) -> Job:
        return self.jobs.get(job.job_uuid).job

    def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            for loop in self.runtime.loops[:2]:
                loop.round()
                assert loop.last_error is None

    def run(self, **changes: Any) -> Job:
        """A job that was submitted and is running."""
        job = self.submit(**changes)
        self.rounds(2)
        job = self.job(job)
        assert job.state == "running"
        return job

    def sees(self, job: Job, **facts: Any) -> None:
        key = (job.run_id, max(1, job.attempt))
        self.backend.seen[key] = replace(self.backend.seen.get(key, Seen(Liveness.ALIVE, started=True)), **facts)

    def ends(self, job: Job, code: int = 0, **facts: Any) -> None:
        how = {"exit_code": code, "reason": "exited"}
        self.sees(job, liveness=Liveness.DEAD, exit=how, **facts)

    def run_dir(self, job: Job) -> RunDir:
        return RunDir(self.runtime.settings.jobs_dir / job.run_id)

    def taken(self) -> list[str]:
        return [slot.device for slot in self.runtime.store.slots.taken()]

    def event_types(self, job: Job) -> list[str]:
        return [event.type for event in self.jobs.events(job.job_uuid).data]


def make_settings(folder: Path, **changes: Any) -> Settings:
    model = folder / "models" / "tiny"
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
        (model / "model.safetensors").write_bytes(b"x" * 100)
    return Settings(**{"storage_dir": folder, "disk_reserve_bytes": 0} | changes)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request) -> dict[str, str]:
    """Settings of the database: everything holds on both."""
    return {} if request.param == "sqlite" else {"database_url": request.getfixturevalue("postgres_url")}


@pytest.fixture
def make_bench(tmp_path, clock, database):
    made = []

    def make(*, slots=("cpu:0",), backend=None, **changes) -> Bench:
        backend = backend or FakeBackend()
        bench = Bench(build(make_settings(tmp_path, **database | changes), backend=backend, clock=clock, slots=slots), backend, clock)
        made.append(bench)
        return bench

    yield make
    for bench in made:
        bench.runtime.stop()


@pytest.fixture
def bench(make_bench) -> Bench:
    return make_bench()


@dataclass
class Standing:
    """A runtime whose loops stand: the test makes their rounds."""

    services: Any

    def start(self) -> None:
        """The loops stand."""

    def stop(self) -> None:
        """They never ran."""


@pytest.fixture
def standing():
    """Makes one of a runtime, to build an application from."""
    return lambda runtime: Standing(runtime.services)


@pytest.fixture
def serve(standing):
    """Runs a bench's application under uvicorn in a thread: a context manager that gives its address."""

    @contextmanager
    def serving(bench: Bench) -> Iterator[str]:
        app = create_app(bench.runtime.settings, build=lambda told: standing(bench.runtime))
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=5))
        sock = server.config.bind_socket()
        sock.listen()  # connections wait until the server accepts them
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

    return serving
