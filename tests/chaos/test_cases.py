"""Situations that users of such services have met, over HTTP and with real processes."""

from __future__ import annotations

import random
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest
from chaos_lab import Lab, broken_checkpoints, until

from posttrain_service.client import ApiError, Client, ServerGone

pytestmark = pytest.mark.slow
ENDS = ("succeeded", "failed", "cancelled", "paused")


def ends(lab: Lab, job: str) -> dict:
    return until(lambda: (view := lab.job(job))["status"] in ENDS and view, f"the end of {job}")


def request(**more: object) -> dict:
    rows = [{"messages": [{"role": "user", "content": "quick"}, {"role": "assistant", "content": "b"}]}]
    return {"model": "tiny", "dataset": {"rows": rows}, **more}


def test_a_server_killed_again_and_again_during_submissions_loses_and_doubles_none(tmp_path: Path) -> None:
    lab, dice, told = Lab(tmp_path), random.Random(7), {}
    lab.server.start()
    over = threading.Event()

    def submit() -> None:
        for _ in range(8):
            name, key = uuid.uuid4().hex, uuid.uuid4().hex
            while name not in told:
                try:
                    with Client(lab.server.address) as client:
                        told[name] = client.create_job(request(name=name), idempotency_key=key)["job_uuid"]
                except (ServerGone, ApiError):
                    time.sleep(0.05)
        over.set()

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        for _ in range(2):
            over.wait(dice.uniform(0.05, 0.5))
            lab.server.send(9)
            lab.server.revive()
        assert over.wait(120)
        thread.join(60)
        for job in told.values():
            assert (ends(lab, job)["status"], lab.job(job)["attempt"]) == ("succeeded", 1)
            assert (lab.run_dir(job).path / "starts").read_text() == "1\n"
        stored = [(view["name"], view["job_uuid"]) for view in lab.server.client.jobs(limit=100)]
        assert sorted(stored) == sorted(told.items())
        folders = {path.name for path in (lab.storage / "jobs").iterdir() if not path.name.startswith(".")}
        assert set(told.values()) <= folders
        # A kill between folder and row leaves a folder that no job has: it is swept later, and nothing ever ran in it.
        assert [name for name in folders - set(told.values()) if lab.run_dir(name).attempts()] == []
    finally:
        lab.close()


def test_many_clients_at_once_get_no_error(chaos_lab: Lab) -> None:
    held = chaos_lab.submit("hold=train", resources={"devices": 2})  # keeps the queue from being emptied meanwhile
    address, over, faults, made = chaos_lab.server.address, threading.Event(), [], []

    def poll() -> None:
        with Client(address) as client:
            while not over.is_set():
                try:
                    client.job(held), client.metrics(held), next(client.jobs(limit=5))
                except Exception as error:
                    faults.append(error)

    def post() -> None:
        with Client(address) as client:
            try:
                made.append(client.create_job(request())["job_uuid"])
            except Exception as error:
                faults.append(error)

    pollers = [threading.Thread(target=poll) for _ in range(12)]
    posters = [threading.Thread(target=post) for _ in range(16)]
    for thread in (*pollers, *posters):
        thread.start()
    for thread in posters:
        thread.join(60)
    over.set()
    for thread in pollers:
        thread.join(60)
    assert faults == []
    assert len(set(made)) == 16
    for job in made:
        chaos_lab.verb(job, "cancel")
    chaos_lab.verb(held, "cancel")
    chaos_lab.accepted += made
    assert ends(chaos_lab, held)["status"] == "cancelled"


@pytest.mark.parametrize("phase", ["data", "save"])
def test_pause_before_and_right_after_the_first_checkpoint_then_resume(chaos_lab: Lab, phase: str) -> None:
    job = chaos_lab.submit(f"hold={phase}", resources={"devices": 2})
    until(lambda: chaos_lab.phase_of(job)[0] == phase, phase)
    chaos_lab.verb(job, "pause")
    if phase == "save":
        chaos_lab.go(job)
    assert ends(chaos_lab, job)["reason"] == "paused"
    chaos_lab.go(job)
    chaos_lab.verb(job, "resume")
    assert until(lambda: (view := chaos_lab.job(job))["status"] == "succeeded" and view, "success")["attempt"] == 2
    points = chaos_lab.server.client.metrics(job)
    assert [point["step"] for point in points] == [1, 2, 3, 4]
    assert [point["attempt"] for point in points] == ([2, 2, 2, 2] if phase == "data" else [1, 1, 2, 2])


def test_cancel_during_a_save_leaves_the_checkpoint_before_it(chaos_lab: Lab, tmp_path: Path) -> None:
    job = chaos_lab.submit("hold=save-4", resources={"devices": 2})
    until(lambda: chaos_lab.phase_of(job) == ("save", 4), "the second save")
    chaos_lab.verb(job, "cancel")
    assert ends(chaos_lab, job)["status"] == "cancelled"
    client = chaos_lab.server.client
    assert [checkpoint["id"] for checkpoint in client.checkpoints(job)] == ["step-000002"]
    assert broken_checkpoints(chaos_lab, job) == []
    assert client.download_checkpoint(job, "step-000002", tmp_path / "out.tar").stat().st_size > 4096
    assert job in [view["job_uuid"] for view in client.jobs(limit=100)]


def test_times_are_right_whatever_the_servers_time_zone(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.server.env["TZ"] = "Asia/Kathmandu"
    try:
        lab.server.start()
        before = datetime.now(UTC)
        view = ends(lab, lab.submit("quick"))
        after = datetime.now(UTC)
        times = [datetime.fromisoformat(view[name]) for name in ("created_at", "started_at", "completed_at")]
        assert before <= times[0] <= times[1] <= times[2] <= after
        events = list(lab.server.client.events(view["job_uuid"]))
        assert all(before <= datetime.fromisoformat(event["created_at"]) <= after for event in events)
    finally:
        lab.close()
