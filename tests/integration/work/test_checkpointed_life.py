"""Pauses around the first checkpoint, and a cancel in the middle of a save: real store, shim and locks, a short script as the rank."""

from __future__ import annotations

import hashlib
import sys

import pytest

from posttrain_trainer.contract.rundir import RunDir

STEPS = 6
# Saves after every second step and when it is paused, and goes on from its newest complete checkpoint. After a step that
# is named by "hold-N" in its first row it waits for a stop; the save of "stuck-N" never gets done.
RANK = '''#!{python}
import hashlib, json, signal, sys, time
from pathlib import Path
from posttrain_trainer.contract.locks import Lock
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, read_json, write_json

attempt = AttemptDir(Path(sys.argv[-1]))
run = RunDir(attempt.path.parent.parent)
todo = json.loads((run.data / "train.jsonl").read_text())["messages"][0]["content"].split()
lock = Lock(attempt.run_lock, shared=True)
stopped = False


def on_term(number, frame):
    global stopped
    stopped = True
    if (read_json(attempt.stop) or {{}}).get("want") == "cancel":
        sys.exit(1)


signal.signal(signal.SIGTERM, on_term)


def save(step):
    folder = run.checkpoint(f"step-{{step:06d}}")
    (folder / "model").mkdir(parents=True, exist_ok=True)
    data = b"weights of step %d" % step
    if f"stuck-{{step}}" in todo:
        (folder / "model" / "weights").write_bytes(data[:7])
        (run.path / "saving").touch()
        signal.pause()
    (folder / "model" / "weights").write_bytes(data)
    files = [{{"path": "model/weights", "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}]
    write_json(folder / "manifest.json", {{"id": folder.name, "step": step, "epoch": 1.0, "created_at": time.time(), "kind": "full",
                                          "attempt": attempt.number, "metrics": {{}}, "files": files}})
    return folder.name


done = max([int(name.removeprefix("step-")) for name in run.checkpoint_ids()], default=0)
for step in range(done + 1, {steps} + 1):
    with attempt.metrics.open("a") as file:
        file.write(json.dumps({{"attempt": attempt.number, "step": step, "epoch": 1.0, "time": time.time(), "loss": 1 / step}}) + "\\n")
    newest = save(step) if step % 2 == 0 else None
    write_json(attempt.heartbeat, {{"time": time.time(), "phase": "train", "step": step, "total_steps": {steps}, "epoch": 1.0}}, durable=False)
    while f"hold-{{step}}" in todo and not stopped:
        time.sleep(0.01)
    if stopped:
        checkpoint = newest or save(step)
        write_json(attempt.result, {{"status": "stopped", "want": "pause", "steps": step, "checkpoint": checkpoint, "warnings": []}})
        sys.exit(1)
write_json(attempt.result, {{"status": "completed", "steps": {steps}, "total_steps": {steps}, "warnings": []}})
'''


@pytest.fixture
def settings(settings):
    settings.trainer_python.write_text(RANK.format(python=sys.executable, steps=STEPS))
    return settings


def moves(server, job_uuid):
    states = ("queued", "launching", "running", "stopping", "paused", "resumed", "cancelled", "succeeded")
    return [event.type for event in server.jobs.events(job_uuid).data if event.type in states]


def test_pause_before_the_first_checkpoint_and_right_after_one_then_resume(server):
    job_uuid = server.submit("hold-1 hold-2")
    for step in (1, 2):
        server.wait_for_step(job_uuid, step)
        server.jobs.pause(job_uuid)
        paused = server.wait_for(job_uuid, "paused")
        assert (paused.reason, paused.attempt) == ("paused", step)
        assert server.alive(job_uuid) == []
        assert server.runtime.store.slots.taken() == []
        assert server.jobs.checkpoints(job_uuid)[-1]["step"] == step
        server.jobs.resume(job_uuid)
    job = server.wait_for(job_uuid, "succeeded")
    assert job.attempt == 3
    points = server.jobs.metrics(job_uuid)
    assert [(p["step"], p["attempt"]) for p in points] == [(1, 1), (2, 2), (3, 3), (4, 3), (5, 3), (6, 3)]
    lines = [line for n in (1, 2, 3) for line in RunDir(server.run_path(job_uuid)).attempt(n).metrics.read_text().splitlines()]
    assert len(lines) == STEPS, "no step was made twice"
    once = ["launching", "running", "stopping", "paused", "resumed"]
    assert moves(server, job_uuid) == ["queued", *once, *once, "launching", "running", "succeeded"]


def test_cancel_during_a_save_leaves_the_last_complete_checkpoint(server):
    job_uuid = server.submit("stuck-4")
    run_path = server.run_path(job_uuid)
    server.wait_for_step(job_uuid, 3)
    while not (run_path / "saving").exists():
        assert server.job(job_uuid).state == "running"
    server.jobs.cancel(job_uuid)
    server.wait_for(job_uuid, "cancelled")
    assert server.alive(job_uuid) == []
    assert (run_path / "checkpoints/step-000004/model/weights").read_bytes() == b"weights", "a half one is there"
    assert [c["id"] for c in server.jobs.checkpoints(job_uuid)] == ["step-000002"]
    path, size = server.jobs.checkpoint_file(job_uuid, "step-000002", "model/weights")
    [file] = server.jobs.checkpoint(job_uuid, "step-000002")["files"]
    data = path.read_bytes()
    assert (data, len(data), hashlib.sha256(data).hexdigest()) == (b"weights of step 2", size, file["sha256"])
    # A retry goes on from there and not from the half one.
    (run_path / "data" / "train.jsonl").write_text((run_path / "data" / "train.jsonl").read_text().replace("stuck-4", "free"))
    server.jobs.retry(job_uuid)
    assert server.wait_for(job_uuid, "succeeded").attempt == 2
    assert [(p["step"], p["attempt"]) for p in server.jobs.metrics(job_uuid)][2:] == [(3, 2), (4, 2), (5, 2), (6, 2)]


def test_a_preempted_job_makes_room_and_goes_on_by_itself(server):
    server.runtime.stop()
    server.settings = server.settings.model_copy(update={"preemption": True})
    server.start()
    low = server.submit("hold-3")
    server.wait_for_step(low, 3)
    high = server.submit("free", resources={"priority": 5})
    server.wait_for(high, "succeeded")
    job = server.wait_for(low, "succeeded")
    assert (job.attempt, job.retries) == (2, 0)
    assert [(p["step"], p["attempt"]) for p in server.jobs.metrics(low)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert moves(server, low) == ["queued", "launching", "running", "stopping", "paused", "queued", "launching", "running", "succeeded"]


def test_a_job_that_ran_for_its_time_keeps_what_it_saved(server):
    job_uuid = server.submit("hold-3", resources={"max_duration_s": 2})
    job = server.wait_for(job_uuid, "failed")
    assert job.reason == "max_duration"
    assert server.jobs.checkpoints(job_uuid)[-1]["step"] == 3
    assert server.alive(job_uuid) == []
