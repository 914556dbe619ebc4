"""Requests made from openapi.yaml, good ones and bad ones: no answer is a failure of the server, and each is as described."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from posttrain_service.app import create_app
from posttrain_service.compose import build
from posttrain_service.domain.job import NewEvent
from posttrain_service.domain.lifecycle import EndReason, JobState
from posttrain_service.settings import Settings
from posttrain_trainer.contract.rundir import RunDir, write_json

JOBS = "/post_training/jobs"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
ODD = ["0", "-1", "x", "a/b", "%00", "\x00", "é", "😀", str(10**30), "-" + str(10**30), "1e999", "nan", "true", "1:1",
       f"{10**8}:{10**14}", "step-000001", "step-" + "9" * 40, "file-" + "0" * 32, "x" * 5000, "[", "ft:a:posttrain::b"]  # fmt: skip
GOOD = {"model": "tiny", "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}}
LLAMA = {
    "job_uuid": "llama", "hyperparam_search_config": {}, "logger_config": {},
    "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 1, "shuffle": True, "data_format": "dialog"}},
}  # fmt: skip
TOOL = """#!/bin/sh
for last; do :; done
case $last in
  estimate) echo '{"memory": {"per_rank_bytes": 1, "total_bytes": 1, "fits": true}, "parameters": 10, "trainable": 10, "steps": 4, "tokens": 40}' ;;
  inspect) echo '{"rows": 1, "tokens": 7, "supervised_tokens": 3, "max_len": 7, "dropped": {}}' ;;
  *) echo '{"version": "0", "contract": 1}' ;;
esac
"""
EXAMPLES = 20
"""Requests for each operation, half of them bad ones: as many as half a minute holds."""


@dataclass
class Running:
    services: Any

    def start(self) -> None:
        """The loops stand: nothing that is made here is launched."""

    def stop(self) -> None:
        """They never ran."""


def finished(runtime, job_uuid):
    """The job as it is after a short run that left a log, metrics and a checkpoint."""
    job = runtime.services.jobs.get(job_uuid).job
    run = RunDir(runtime.settings.jobs_dir / job.run_id)
    run.attempt(1).rank_log(0).parent.mkdir(parents=True)
    run.attempt(1).rank_log(0).write_bytes(b"50%\r\x1b[1mwords\xff\n")
    point = {"v": 1, "attempt": 1, "step": 1, "epoch": 0.5, "time": time.time(), "loss": 1.0, "grad_norm": None}
    run.attempt(1).metrics.write_text(json.dumps(point) + "\n")
    folder = run.checkpoint("step-000001")
    (folder / "model").mkdir(parents=True)
    (folder / "model/weights").write_bytes(b"w")
    files = [{"path": "model/weights", "size_bytes": 1, "sha256": hashlib.sha256(b"w").hexdigest()}]
    write_json(folder / "manifest.json", {
        "v": 1, "id": "step-000001", "step": 1, "epoch": 1.0, "samples_seen": 4, "tokens_seen": 40, "attempt": 1, "created_at": time.time(),
        "kind": "full", "trigger": "end", "metrics": {"loss": 0.25}, "arguments_digest": "x", "files": files})  # fmt: skip
    move = runtime.store.jobs.move
    assert move(job.run_id, {JobState.QUEUED}, JobState.LAUNCHING, event=NewEvent("launching", "up"), changes={"attempt": 1})
    done = {"reason": EndReason.COMPLETED}
    assert move(job.run_id, {JobState.LAUNCHING}, JobState.SUCCEEDED, event=NewEvent("succeeded", "done"), changes=done)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A client of an application, its description, the ids of what is there, and by path a body that is good."""
    storage = tmp_path_factory.mktemp("described")
    tool = storage / "tool"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    (storage / "models/tiny").mkdir(parents=True)
    (storage / "models/tiny/config.json").write_text('{"max_position_embeddings": 128}')
    runtime = build(Settings(storage_dir=storage, trainer_python=tool, disk_reserve_bytes=0), slots=("cpu:0",))
    app = create_app(runtime.settings, build=lambda told: Running(runtime.services))
    with TestClient(app, base_url="http://127.0.0.1:8484", raise_server_exceptions=False, follow_redirects=False) as http:
        assert http.post(JOBS, json={**GOOD, "job_uuid": "known"}).status_code == 201
        finished(runtime, "known")
        form = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", b'{"prompt": "a", "completion": "b"}\n')}}
        upload = {"bytes": 1000, "filename": "b", "purpose": "fine-tune", "mime_type": "text/plain"}
        ids = {
            "job_uuid": "known", "job_id": "known", "checkpoint_id": "step-000001", "path": "model/weights",
            "file_id": http.post("/v1/files", **form).json()["id"], "upload_id": http.post("/v1/uploads", json=upload).json()["id"],
            "model": http.get(f"{JOBS}/known").json()["fine_tuned_model"], "dataset_id": "rows",
        }  # fmt: skip
        ids |= {
            JOBS: GOOD, "/post_training/datasets/validate": {"dataset": GOOD["dataset"]}, "/v1/uploads": upload,
            "/v1/fine_tuning/jobs": {"model": "tiny", "training_file": ids["file_id"]},
            "/v1/datasets": {"purpose": "post-training/messages", "source": {"type": "rows", "rows": GOOD["dataset"]["rows"]}, "dataset_id": "rows"},
            **{f"/v1/post-training/{path}": LLAMA | more for path, more in (
                ("supervised-fine-tune", {"model": "tiny"}), ("preference-optimize", {"finetuned_model": "tiny", "algorithm_config": {"beta": 0.1}}))},
        }  # fmt: skip
        assert http.post("/v1/datasets", json=ids["/v1/datasets"]).status_code == 200
        yield http, schemathesis.openapi.from_dict(app.openapi()), ids
    runtime.store.close()


def described():
    """Every operation; of those that answer at two addresses by the same function only one."""
    paths = create_app(Settings()).openapi()["paths"].items()
    return [(method, path) for path, methods in paths for method in methods if not path.startswith(("/v1alpha/", "/v1beta/"))]


def request(data, operation, path, mode, ids):
    """One request for an operation: as schemathesis makes it, or with what is there, or with something odd in its place."""
    case = data.draw(operation.as_strategy(generation_mode=mode))
    how = data.draw(st.sampled_from(["as it is", "known", "known", "odd"]))
    if how == "known" and operation.method != "delete":
        case.path_parameters = {name: ids.get(name, value) for name, value in (case.path_parameters or {}).items()}
        if isinstance(case.body, dict) and path in ids:  # whole but for one field: else nothing gets past the first check
            name = data.draw(st.sampled_from(["", *case.body]))
            case.body = ids[path] | ({name: case.body[name]} if name else {})
    if how == "odd":
        for name in case.path_parameters or {}:
            case.path_parameters[name] = data.draw(st.sampled_from(ODD))
        for name in case.query or {}:
            case.query[name] = data.draw(st.sampled_from(["", "..", *ODD]))
    return case


@pytest.mark.parametrize(("method", "path"), described(), ids=lambda part: str(part))
def test_every_answer_is_as_described(world, method, path):
    http, schema, ids = world
    operation = schema[path][method]

    @hypothesis.settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.data(), st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    def ask(data, mode):
        case = request(data, operation, path, mode, ids)
        sent = requests.Request(**case.as_transport_kwargs(base_url="http://127.0.0.1:8484")).prepare()
        answer = http.request(sent.method, sent.url, headers=dict(sent.headers), content=sent.body)
        case.validate_response(answer, checks=CHECKS if path != "/health/ready" else CHECKS[1:])  # 503 is what it is there to say

    ask()


def test_an_answer_that_is_not_as_described_is_found(world):
    http, _, _ = world
    told = http.get("/openapi.json").json()
    told["components"]["schemas"]["Version"]["required"].append("missing")
    case = schemathesis.openapi.from_dict(told)["/version"]["get"].Case()
    with pytest.raises(schemathesis.errors.FailureGroup):
        case.validate_response(http.get("/version"), checks=CHECKS)
