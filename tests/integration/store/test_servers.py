"""Whole servers on one database: a job's life on either kind, and two servers of which one acts at a time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.compose import Runtime, build
from posttrain_service.settings import Settings
from posttrain_service.wire.jobs import JobRequest
from posttrain_trainer.contract import proc

LEASE_S = 2.0
# Stands in for torchrun and its rank: notes that it ran, and says that it is done once the file `go` is there.
STAND_IN = """#!{python}
import sys, time
from pathlib import Path
from posttrain_trainer.contract.rundir import AttemptDir, write_json
attempt = AttemptDir(Path(sys.argv[-1]))
run = attempt.path.parent.parent
with (run / "starts").open("a") as file:
    file.write(str(attempt.number) + "\\n")
write_json(attempt.heartbeat, {{"time": time.time(), "phase": "train", "step": 1, "total_steps": 1, "epoch": 1.0}})
while not (run / "go").exists():
    time.sleep(0.01)
write_json(attempt.result, {{"status": "completed", "steps": 1, "total_steps": 1, "epochs": 1.0, "samples_seen": 1,
                            "tokens_seen": 1, "train_time_s": 0.1, "warnings": []}})
"""
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait for what loops and processes do by themselves; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


@pytest.fixture
def open_server(tmp_path: Path, database_url: str) -> Iterator[Callable[[str], Runtime]]:
    """Servers on hosts of their own: one database and one set of files, but a lock file each, as between machines."""
    python = tmp_path / "stand-in"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    model = tmp_path / "shared" / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    for name in ("jobs", "files"):
        (tmp_path / "shared" / name).mkdir()
    opened: list[Runtime] = []

    def open_(host: str) -> Runtime:
        folder = tmp_path / host
        folder.mkdir()
        for name in ("jobs", "files", "models"):
            (folder / name).symlink_to(tmp_path / "shared" / name)
        settings = Settings(
            storage_dir=folder, database_url=database_url, trainer_python=python, disk_reserve_bytes=0,
            lease_ttl_s=LEASE_S, supervise_interval_s=0.1, stop_grace_s=5,
        )  # fmt: skip
        opened.append(build(settings, slots=("cpu:0", "cpu:1")))
        return opened[-1]

    yield open_
    for runtime in opened:
        runtime.stop()
    for run in (tmp_path / "shared" / "jobs").iterdir():
        assert proc.kill_marked(run.name).left == ()


def submit(server: Runtime) -> str:
    body = JobRequest.model_validate({"model": "tiny", "dataset": {"rows": [ROW]}})
    return server.services.jobs.create(body)[0].job.job_uuid


def run_path(server: Runtime, job_uuid: str) -> Path:
    return server.settings.jobs_dir / server.services.jobs.get(job_uuid).job.run_id


def wait_for(server: Runtime, job_uuid: str, state: str) -> None:
    until(lambda: server.services.jobs.get(job_uuid).job.state == state)


def test_a_job_from_submission_to_its_end_and_deletion(open_server: Callable[[str], Runtime]) -> None:
    server = open_server("one")
    server.start()
    job_uuid = submit(server)
    wait_for(server, job_uuid, "running")
    folder = run_path(server, job_uuid)
    (folder / "go").touch()
    wait_for(server, job_uuid, "succeeded")
    types = [event.type for event in server.services.jobs.events(job_uuid).data]
    assert types == ["queued", "launching", "running", "succeeded"]
    assert server.store.slots.taken() == []
    assert server.store.jobs.count_by_state()["succeeded"] == 1
    server.services.jobs.delete(job_uuid)
    assert not folder.exists()


def test_two_servers_one_acts_nothing_starts_twice_and_the_other_takes_over(
    open_server: Callable[[str], Runtime], database_url: str
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("a SQLite file is one host's; there the lock file decides, see the tests of killed servers")
    first, second = open_server("one"), open_server("two")
    for server in (first, second):
        server.start()
    jobs = [submit(server) for _ in range(3) for server in (first, second)]
    until(lambda: len(first.store.slots.taken()) == 2)
    led = [server for server in (first, second) if server.leader.lease() is not None]
    assert len(led) == 1
    [leader] = led
    other = second if leader is first else first
    for job_uuid in jobs[:4]:
        until(lambda job_uuid=job_uuid: (run_path(other, job_uuid) / "starts").exists())
        (run_path(other, job_uuid) / "go").touch()
        wait_for(other, job_uuid, "succeeded")

    for loop in leader.loops:  # it stands still, as if it had been killed: nothing is given back
        loop.stop()
    stood_still = time.monotonic()
    until(lambda: other.leader.lease() is not None)
    took_s = time.monotonic() - stood_still
    assert took_s <= LEASE_S + 1.0
    for job_uuid in jobs[4:]:
        (run_path(other, job_uuid) / "go").touch()
        wait_for(other, job_uuid, "succeeded")
    assert [(run_path(other, job_uuid) / "starts").read_text().split() for job_uuid in jobs] == [["1"]] * 6
    assert other.store.slots.taken() == []
