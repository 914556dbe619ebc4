"""The real service below HTTP: real store, real shims and locks; a small script stands in for torchrun and the ranks."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.compose import Runtime, build
from posttrain_service.domain.job import Job
from posttrain_service.settings import Settings
from posttrain_service.wire.jobs import JobRequest
from posttrain_trainer.contract import proc

# What it does is said by the first row of its data set, e.g. "wait fail": it waits for the file `go`, then fails.
STAND_IN = '''#!{python}
"""Stands in for torchrun and its one rank."""
import json, os, signal, sys, time
from pathlib import Path
from posttrain_trainer.contract.locks import Lock
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, read_json, write_json

attempt = AttemptDir(Path(sys.argv[-1]))
run = RunDir(attempt.path.parent.parent)
args = read_json(attempt.arguments)["train_args"]
todo = json.loads(Path(args["data_path"]).read_text().splitlines()[0])["messages"][0]["content"].split()
lock = Lock(attempt.run_lock, shared=True)
log = attempt.rank_log(0).open("a", buffering=1)
stopped = False


def on_term(number, frame):
    global stopped
    stopped = True


signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in todo else on_term)


def event(kind, message, **data):
    record = {{"time": time.time(), "attempt": attempt.number, "type": kind, "message": message, "data": data}}
    with attempt.events.open("a") as file:
        file.write(json.dumps(record) + "\\n")


def beat(step):
    heartbeat = {{"time": time.time(), "phase": "train", "step": step, "total_steps": 4, "epoch": step / 4}}
    write_json(attempt.heartbeat, heartbeat, durable=False)


def result(status, **more):
    record = {{"status": status, "steps": 4, "total_steps": 4, "epochs": 1.0, "samples_seen": 4, "tokens_seen": 40,
              "train_time_s": 0.1, "warnings": ["a word of warning"]}}
    write_json(attempt.result, record | more)


with (run.path / "starts").open("a") as file:
    file.write(f"{{attempt.number}}\\n")
event("phase", "training begins")
for step in range(1, 5):
    point = {{"attempt": attempt.number, "step": step, "epoch": step / 4, "time": time.time(), "loss": 1 / step}}
    with attempt.metrics.open("a") as file:
        file.write(json.dumps(point) + "\\n")
    beat(step)
    print("step", step, "\\u2713", file=log)
    while step == 2 and "wait" in todo and not (run.path / "go").exists() and not stopped:
        time.sleep(0.01)
    if stopped:
        want = (read_json(attempt.stop) or {{}}).get("want")
        result("stopped", want=want, steps=step)
        sys.exit(1)
if "fail" in todo or ("fail-once" in todo and attempt.number == 1):
    print("Traceback: the reason", file=log)
    error = {{"code": "out_of_memory", "message": "no memory left", "rank": 0, "exit_code": 1, "details": {{}}, "retryable": False}}
    write_json(attempt.error(0), error)
    sys.exit(1)
event("ended", "done")
result("completed")
'''


def rows(todo: str) -> dict[str, Any]:
    return {"rows": [{"messages": [{"role": "user", "content": todo}, {"role": "assistant", "content": "b"}]}]}


def request(todo: str = "succeed", **more: Any) -> JobRequest:
    return JobRequest.model_validate({"model": "tiny", "dataset": rows(todo)} | more)


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait for something that another process or a loop's thread does; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


class Server:
    """A service that can be killed and built anew."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runtime: Runtime | None = None

    def start(self, **options: Any) -> Runtime:
        self.runtime = build(self.settings, slots=["cpu:0"], **options)
        self.runtime.start()
        return self.runtime

    @property
    def jobs(self):
        return self.runtime.services.jobs

    def submit(self, todo: str = "succeed", **more: Any) -> str:
        return self.jobs.create(request(todo, **more))[0].job.job_uuid

    def job(self, job_uuid: str) -> Job:
        return self.jobs.get(job_uuid).job

    def run_path(self, job_uuid: str) -> Path:
        return self.settings.jobs_dir / self.job(job_uuid).run_id

    def wait_for(self, job_uuid: str, *states: str) -> Job:
        try:
            return until(lambda: (job := self.job(job_uuid)).state in states and job)
        except AssertionError as error:
            told = [f"{event.type}: {event.message}" for event in self.jobs.events(job_uuid).data]
            raise AssertionError("\n".join([f"waited in vain for {states} of {self.job(job_uuid)}", *told])) from error

    def wait_for_step(self, job_uuid: str, step: int) -> None:
        until(lambda: (self.jobs.get(job_uuid).progress or {}).get("step") == step)

    def go(self, job_uuid: str) -> None:
        """Let a stand-in that waits go on."""
        (self.run_path(job_uuid) / "go").touch()

    def starts(self, job_uuid: str) -> list[int]:
        """The attempts that really ran, each as often as it did."""
        return [int(line) for line in (self.run_path(job_uuid) / "starts").read_text().split()]

    def alive(self, job_uuid: str) -> list[proc.Identity]:
        return proc.find(self.job(job_uuid).run_id)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    python = tmp_path / "stand-in"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    model = tmp_path / "storage" / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    return Settings(storage_dir=tmp_path / "storage", trainer_python=python, disk_reserve_bytes=0, stop_grace_s=5)


@pytest.fixture
def server(settings: Settings) -> Iterator[Server]:
    server = Server(settings)
    server.start()
    yield server
    if server.runtime is not None:
        server.runtime.stop()
    for folder in settings.jobs_dir.iterdir():
        assert proc.kill_marked(folder.name).left == ()
