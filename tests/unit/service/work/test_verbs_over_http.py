"""The table of verbs, row by row over HTTP; repeats of a request, and what a restart leaves."""

from __future__ import annotations

import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi.testclient import TestClient

from posttrain_service.app import create_app
from posttrain_trainer.contract.rundir import write_json

JOBS = "/post_training/jobs"
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BODY = {"model": "tiny", "dataset": {"rows": [ROW]}}
DONE = {"status": "completed", "steps": 4}
OOM = {"code": "out_of_memory", "message": "no memory", "rank": 0}


@dataclass
class Running:
    """The services without their loops, whose rounds the test makes."""

    services: Any

    def start(self) -> None:
        """The loops stand."""

    def stop(self) -> None:
        """They never ran."""


@contextlib.contextmanager
def serving(bench):
    app = create_app(bench.runtime.settings, build=lambda told: Running(bench.runtime.services))
    with TestClient(app, base_url="http://127.0.0.1:8484", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def http(bench):
    with serving(bench) as client:
        yield client


def brought(bench, state):
    """A job that is in `state`; after a colon what a stop was asked for."""
    job = bench.submit()
    if state == "queued":
        return job
    if state == "paused":
        bench.jobs.pause(job.job_uuid)
        return job
    if state == "cancelled":
        bench.jobs.cancel(job.job_uuid)
        return job
    bench.runtime.loops[1].round()
    if state == "launching":
        return job
    bench.rounds(2)
    if state.startswith("stopping"):
        getattr(bench.jobs, state.split(":")[1])(job.job_uuid)
    elif state == "succeeded":
        bench.ends(bench.job(job), result=DONE)
        bench.rounds()
    elif state == "failed":
        bench.ends(bench.job(job), 1, error=OOM)
        bench.rounds()
    return job


TABLE = {
    # state: what follows cancel, pause, resume, retry, DELETE: the state then, or 409
    "queued": ("cancelled", "paused", "queued", "queued", 409),
    "launching": ("stopping", "stopping", "launching", "launching", 409),
    "running": ("stopping", "stopping", "running", "running", 409),
    "stopping:cancel": ("stopping", 409, 409, 409, 409),
    "stopping:pause": ("stopping", "stopping", 409, 409, 409),
    "paused": ("cancelled", "paused", "queued", 409, 409),
    "succeeded": (409, 409, 409, 409, 204),
    "failed": (409, 409, 409, "queued", 204),
    "cancelled": ("cancelled", 409, 409, "queued", 204),
}


@pytest.mark.parametrize("state", TABLE)
def test_the_table_of_verbs(make_bench, state):
    bench = make_bench(slots=tuple(f"cpu:{number}" for number in range(8)))  # one application for the five verbs
    with serving(bench) as http:
        for verb, expected in zip(("cancel", "pause", "resume", "retry", "delete"), TABLE[state], strict=True):
            ask(bench, http, state, verb, expected)


def ask(bench, http, state, verb, expected):
    job = brought(bench, state)
    path = f"{JOBS}/{job.job_uuid}"
    before = http.get(path).json()
    assert before["status"] == state.split(":")[0]
    answer = http.delete(path) if verb == "delete" else http.post(f"{path}/{verb}")
    if expected == 204:
        assert answer.status_code == 204
        assert http.get(path).status_code == 404
        assert not bench.run_dir(job).path.exists()
        return
    if expected == 409:
        assert answer.status_code == 409, (verb, answer.json())
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert error["code"] == f"cannot_{verb}"
        assert state.split(":")[0] in error["message"]
        assert told(http, path) == steady(before), "a refused verb changes nothing"
        return
    assert (answer.status_code, answer.json()["status"]) == (200, expected), verb
    events = bench.event_types(job)
    again = http.post(f"{path}/{verb}")
    assert (again.status_code, again.json()["status"]) == (200, expected), "a repeat is harmless"
    assert bench.event_types(job) == events
    if expected == before["status"] and (state, verb) != ("stopping:pause", "cancel"):
        assert steady(again.json()) == steady(before), "what holds already is left alone"


def steady(shown):
    """A job without what other jobs change: its place, and what its processes use."""
    return {key: value for key, value in shown.items() if key not in ("queue_position", "resources_allocated")}


def told(http, path):
    return steady(http.get(path).json())


@pytest.mark.parametrize(("want", "end"), [("cancel", "cancelled"), ("pause", "paused")])
def test_a_stop_that_was_asked_for_while_launching(bench, http, want, end):
    job = brought(bench, "launching")
    assert http.post(f"{JOBS}/{job.job_uuid}/{want}").json()["status"] == "stopping"
    bench.rounds()
    assert bench.backend.named("stop")[-1] == ("stop", job.run_id, 1, want)
    bench.sees(bench.job(job), liveness="dead", exit={"reason": "stopped", "stop_want": want, "exit_code": 1})
    bench.rounds()
    assert http.get(f"{JOBS}/{job.job_uuid}").json()["status"] == end
    assert bench.taken() == []


def test_places_in_the_queue(bench, http):
    brought(bench, "running")
    first, urgent = bench.submit(), bench.submit(resources={"priority": 7})
    places = {job["job_uuid"]: job["queue_position"] for job in http.get(JOBS).json()["data"]}
    assert (places[urgent.job_uuid], places[first.job_uuid]) == (1, 2)
    assert http.post(f"{JOBS}/{urgent.job_uuid}/pause").json()["queue_position"] is None
    assert http.get(f"{JOBS}/{first.job_uuid}").json()["queue_position"] == 1
    assert http.post(f"{JOBS}/{urgent.job_uuid}/resume").json()["queue_position"] == 1


def test_the_same_key_is_one_job_at_the_same_time_and_after_a_restart(make_bench):
    bench = make_bench()
    headers = {"Idempotency-Key": "k-1"}
    with serving(bench) as http:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: http.post(JOBS, json=BODY, headers=headers), range(16)))
        assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]
        [job_uuid] = {answer.json()["job_uuid"] for answer in answers}
        assert http.post(JOBS, json=BODY | {"name": "other"}, headers=headers).status_code == 422
        for _ in range(2):
            assert http.post(f"{JOBS}/{job_uuid}/cancel").status_code == 200
    bench.runtime.stop()
    later = make_bench()
    with serving(later) as http:
        again = http.post(JOBS, json=BODY, headers=headers)
        assert (again.status_code, again.json()["job_uuid"], again.json()["status"]) == (200, job_uuid, "cancelled")
        assert http.post(JOBS, json=BODY | {"name": "other"}, headers=headers).status_code == 422
        assert len(http.get(JOBS).json()["data"]) == 1
    assert len(list(later.runtime.settings.jobs_dir.iterdir())) == 1


def test_a_restart_lists_every_job_and_a_cancelled_one_keeps_its_artifacts(make_bench):
    bench = make_bench()
    jobs = {state: brought(bench, state) for state in ("succeeded", "failed", "cancelled", "paused")}
    jobs["running"] = bench.run()
    jobs["queued"] = bench.submit()
    running = bench.job(jobs["running"])
    folder = bench.run_dir(running).checkpoint("step-000002")
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "a.bin").write_bytes(b"weights")
    files = [{"path": "model/a.bin", "size_bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}]
    manifest = {"id": folder.name, "step": 2, "epoch": 1.0, "created_at": 1.0, "kind": "full", "metrics": {}, "files": files}
    write_json(folder / "manifest.json", manifest)
    bench.runtime.stop()
    later = make_bench(backend=bench.backend)
    with serving(later) as http:
        found = {job["job_uuid"]: job["status"] for job in http.get(JOBS).json()["data"]}
        assert found == {job.job_uuid: state for state, job in jobs.items()}
        path = f"{JOBS}/{running.job_uuid}"
        assert http.post(f"{path}/cancel").status_code == 200
        later.sees(running, liveness="dead", exit={"reason": "stopped", "stop_want": "cancel", "exit_code": 1})
        later.rounds()
        assert http.get(path).json()["status"] == "cancelled"
        assert [c["id"] for c in http.get(path).json()["checkpoints"]] == ["step-000002"]
        assert http.get(f"{path}/checkpoints/step-000002/files/model/a.bin").content == b"weights"
