"""Several servers, older servers, and servers that cannot write: one leads, none is fooled, each says what is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_lab import Lab, Server, until
from chaos_rounds import SETTLE_S, Check, Round

from posttrain_service.client import ApiError
from posttrain_trainer.contract import proc

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def ends(lab: Lab, job: str, *states: str) -> dict:
    return until(lambda: (view := lab.job(job))["status"] in states and view, f"{states} of {job}", SETTLE_S)


def test_of_two_servers_on_one_folder_one_leads_and_the_other_takes_over(lab: Lab) -> None:
    lab.server.start()
    second = Server(lab.storage, lab.storage.parent / "python")
    second.start()
    try:
        held = lab.submit("hold=train", resources={"devices": 2})
        until(lambda: lab.phase_of(held) == ("train", 2), "the second step")
        first, lab.server = lab.server, second
        waiting = lab.submit("quick", resources={"devices": 2})  # accepted by the one that does not lead
        assert [lab.job(job)["status"] for job in (held, waiting)] == ["running", "queued"]
        first.send(signal.SIGKILL)
        first.stop()
        lab.go(held)
        for job in (held, waiting):
            assert ends(lab, job, "succeeded", "failed")["status"] == "succeeded"
        one = Round("server", "train", "SIGKILL", struck=["server"])
        Check(one, lab, held, waiting).all()
        assert one.violations == []
    finally:
        second.stop()


def test_a_job_of_an_older_copy_is_adopted_after_the_upgrade(lab: Lab, repository: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    for name in ("service", "trainer", "migrations"):
        shutil.copytree(repository / name, old / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repository / "pyproject.toml", old)
    # As the release before was: no control group in run.json, no lock for the ranks to watch, no monotonic time.
    shim = old / "service/posttrain_service/launch/shim.py"
    shim.write_text(shim.read_text().replace('"cgroup": None if group is None else str(group),', ""))
    plan = old / "service/posttrain_service/launch/plan.py"
    plan.write_text(plan.read_text().replace("env[ENV_LAUNCHER_LOCK] = ", "_ = "))
    new = lab.server
    lab.server = Server(lab.storage, lab.storage.parent / "python")
    lab.server.env["PYTHONPATH"] = os.pathsep.join([str(old / "service"), str(old / "trainer")])
    lab.server.start()
    finished, cancelled = (lab.submit("hold=train", resources={"devices": 1}) for _ in range(2))
    for job in (finished, cancelled):
        until(lambda job=job: lab.phase_of(job) == ("train", 2), "the second step")
        shim_of = lab.process(job, "shim")
        assert shim_of is not None
        assert str(old) in Path(f"/proc/{shim_of.pid}/cmdline").read_text()
    lab.server.send(signal.SIGTERM)
    assert lab.server.process is not None
    lab.server.process.wait(30)
    lab.server.stop()
    shutil.rmtree(old)
    lab.server = new
    lab.server.start()
    assert [lab.job(job)["status"] for job in (finished, cancelled)] == ["running", "running"]
    lab.go(finished)
    lab.verb(cancelled, "cancel")
    assert ends(lab, finished, "succeeded", "failed")["status"] == "succeeded"
    assert ends(lab, cancelled, "cancelled", "failed")["status"] == "cancelled"
    assert [lab.job(job)["attempt"] for job in (finished, cancelled)] == [1, 1]
    assert lab.alive(finished) == lab.alive(cancelled) == []


def test_a_rank_obeys_or_is_killed_in_time_and_the_time_is_told(lab: Lab) -> None:
    grace_s = 3.0
    lab.server.start()
    for todo, limit_s in (("hold=train", 2.0), ("hold=train deaf", grace_s + 2.0)):
        job = lab.submit(todo, resources={"devices": 2}, torchrun={"shutdown_timeout_s": int(grace_s)})
        until(lambda job=job: lab.phase_of(job) == ("train", 2), "the second step")
        lab.verb(job, "cancel")
        ends(lab, job, "cancelled")
        assert lab.alive(job) == []
        [end] = [event for event in lab.server.client.events(job) if event["type"] == "cancelled"]
        # The bound is for a machine that has a core free.
        assert end["data"]["stop_took_s"] <= limit_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert (end["data"]["stop_took_s"] >= grace_s) == ("deaf" in todo)


def test_without_any_server_the_ranks_of_a_killed_shim_end_by_themselves(lab: Lab) -> None:
    lab.server.start()
    job = lab.submit("hold=train", resources={"devices": 2})
    until(lambda: lab.phase_of(job) == ("train", 2), "the second step")
    lab.server.send(signal.SIGKILL)
    shim = lab.process(job, "shim")
    assert shim is not None
    assert proc.send(shim, signal.SIGKILL)
    until(lambda: lab.alive(job) == [], "the end of all ranks", 20)
    lab.server.revive()
    assert ends(lab, job, "failed")["reason"] == "lost"


def test_server_and_trainer_killed_together_are_judged_within_ten_seconds_of_the_next_start(lab: Lab) -> None:
    lab.server.start()
    job = lab.submit("hold=train", resources={"devices": 2})
    until(lambda: lab.phase_of(job) == ("train", 2), "the second step")
    lab.server.send(signal.SIGKILL)
    for identity in lab.alive(job):
        proc.send(identity, signal.SIGKILL)
    lab.server.revive()
    begun = time.monotonic()
    view = ends(lab, job, "failed")
    assert (view["reason"], view["attempt"]) == ("lost", 1)
    assert time.monotonic() - begun < 10
    after = lab.submit("quick", resources={"devices": 2})  # what a lost job held is free again
    assert ends(lab, after, "succeeded", "failed")["status"] == "succeeded"


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", folder], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a read-only disk needs the right to mount one: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True, timeout=20)


def test_a_storage_that_cannot_be_written_is_said_in_a_sentence(read_only: Path) -> None:
    argv = [sys.executable, "-m", "posttrain_service", "serve", "--port", "0", "--storage-dir", str(read_only / "storage")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_that_cannot_be_written_are_refused_and_nothing_else_suffers(lab: Lab, read_only: Path) -> None:
    lab.server.start()
    job = lab.submit("hold=train", resources={"devices": 2})
    until(lambda: lab.phase_of(job) == ("train", 2), "the second step")
    jobs = lab.storage / "jobs"
    # The folder of runs as this server sees it becomes read-only; what runs has its files open and goes on.
    subprocess.run(["mount", "--bind", read_only, jobs], check=True, timeout=20)
    try:
        with pytest.raises(ApiError) as caught:
            lab.submit("quick")
        assert caught.value.status in (500, 503, 507)
        assert str(lab.storage) not in caught.value.message
        assert [view["job_uuid"] for view in lab.server.client.jobs()] == [job]
    finally:
        subprocess.run(["umount", jobs], check=True, timeout=20)
    after = lab.submit("quick", resources={"devices": 2})
    lab.go(job)
    assert ends(lab, after, "succeeded", "failed")["status"] == "succeeded"
