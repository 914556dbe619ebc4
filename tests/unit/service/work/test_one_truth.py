"""One job, made through any API, seen through all of them and the command line: the same ids, the right states."""

from __future__ import annotations

import json
from urllib.parse import unquote

import httpx
import openai
import pytest
from typer.testing import CliRunner

from posttrain_service.cli.main import app as command
from posttrain_service.client import Client
from posttrain_service.domain.keys import make_key

ROWS = b'{"prompt": "a", "completion": "b"}\n' * 3
OPENAI = {
    "queued": "queued", "launching": "queued", "running": "running", "stopping": "running", "paused": "paused",
    "succeeded": "succeeded", "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip
LLAMA = {
    "queued": "scheduled", "launching": "scheduled", "running": "in_progress", "stopping": "in_progress", "paused": "scheduled",
    "succeeded": "completed", "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip
DONE = {"status": "completed", "steps": 4}


def native(client, face, file_id):
    return client.create_job({"model": "tiny", "dataset": file_id, "name": "mine", "metadata": {"team": "x"}})["job_uuid"]


def openais(client, face, file_id):
    return face.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="mine", metadata={"team": "x"}).id


def llamas(client, face, file_id):
    """llama-stack's request knows no name and no labels: those are looked for in the other two."""
    data = {"dataset_id": file_id, "batch_size": 1, "shuffle": True, "data_format": "dialog"}
    body = {"job_uuid": "team/1", "model": "tiny", "training_config": {"n_epochs": 1, "data_config": data}}
    made = httpx.post(f"{llama_url(face)}/supervised-fine-tune", json=body | {"hyperparam_search_config": {}, "logger_config": {}}, headers=key_of(face))
    assert made.json() == {"job_uuid": "team/1", "status": "scheduled"}, made.text
    return "team%2F1"


def llama_url(face):
    return f"{face.base_url}post-training"


def key_of(face):
    return {"authorization": f"Bearer {face.api_key}"}


@pytest.mark.parametrize("make", [native, openais, llamas])
def test_a_job_is_the_same_in_every_api(bench, serve, make):
    key, text = make_key("ann", "submit", 0.0)
    bench.runtime.store.keys.insert(key)
    with serve(bench) as address, Client(address, api_key=text) as client, openai.OpenAI(
        api_key=text, base_url=f"{address}/v1", max_retries=0
    ) as face:  # fmt: skip

        def says(*words):
            told = CliRunner().invoke(command, ["jobs", *words, "--json"], env={"POSTTRAIN_SERVER": address, "POSTTRAIN_API_KEY": text})
            assert told.exit_code == 0, told.output
            return json.loads(told.stdout)

        def everywhere(state):
            """The job is in `state`, whoever is asked."""
            assert client.job(uuid)["status"] == state
            assert [(job["job_uuid"], job["status"]) for job in client.jobs()] == [(uuid, state)]
            assert [job["job_uuid"] for job in client.jobs(status=state, **labels)] == [uuid]
            assert (says("show", uuid)["status"], [job["status"] for job in says("list")]) == (state, [state])
            one = face.fine_tuning.jobs.retrieve(uuid)
            assert (one.status, one.model, one.training_file, one.metadata) == (OPENAI[state], "tiny", file_id, {"team": "x"} if labels else None)
            assert [(job.id, job.status) for job in face.fine_tuning.jobs.list(metadata={"team": "x"} if labels else None)] == [(uuid, OPENAI[state])]
            theirs = {"job_uuid": unquote(uuid), "status": LLAMA[state]}
            assert httpx.get(f"{llama_url(face)}/jobs", headers=key_of(face)).json() == {"data": [theirs]}
            for url in (f"job/status?job_uuid={uuid}", f"jobs/{uuid}/status"):
                seen = httpx.get(f"{llama_url(face)}/{url}", headers=key_of(face)).json()
                assert {key: seen[key] for key in theirs} == theirs
            assert (one.finished_at is not None) == (state in ("succeeded", "failed", "cancelled"))

        file_id = face.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune").id
        uuid = make(client, face, file_id)
        labels = {} if make is llamas else {"metadata[team]": "x"}
        [validator] = [loop for loop in bench.runtime.loops if loop.name == "validator"]
        if make is openais:
            assert (client.job(uuid)["status"], face.fine_tuning.jobs.retrieve(uuid).status) == ("queued", "validating_files")
        validator.round()
        everywhere("queued")
        bench.runtime.loops[1].round()
        everywhere("launching")
        bench.rounds(2)
        everywhere("running")
        assert face.fine_tuning.jobs.pause(uuid).status == "running"
        everywhere("stopping")
        bench.ends(bench.jobs.get(uuid).job, result={"status": "stopped", "steps": 2})
        bench.rounds()
        everywhere("paused")
        assert says("resume", uuid)["status"] == "queued"
        everywhere("queued")
        bench.rounds(2)
        assert client.cancel(uuid)["status"] == "stopping"
        bench.ends(bench.jobs.get(uuid).job, result={"status": "stopped", "steps": 2})
        bench.rounds()
        everywhere("cancelled")
        assert says("retry", uuid)["status"] == "queued"
        bench.rounds(2)
        bench.ends(bench.jobs.get(uuid).job, 1, error={"code": "out_of_memory", "message": "no memory", "rank": 0})
        bench.rounds()
        everywhere("failed")
        assert face.fine_tuning.jobs.retrieve(uuid).error.code == client.job(uuid)["error"]["code"] == "out_of_memory"
        client.retry(uuid)
        bench.rounds(2)
        bench.ends(bench.jobs.get(uuid).job, result=DONE)
        bench.rounds()
        everywhere("succeeded")
        told = [event["message"] for event in client.events(uuid)]
        seen = [event.message for event in face.fine_tuning.jobs.list_events(uuid)]
        assert set(told) <= set(seen)
        assert [event["message"] for event in says("events", uuid)] == told
