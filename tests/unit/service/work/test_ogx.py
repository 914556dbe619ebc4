"""The routes for OGX, in an application that is not ours: answers, and errors in the form that its handlers know."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from posttrain_service.adapters.ogx import Provider, create_router

ROWS = [{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}]


@pytest.fixture
def http(bench):
    app = FastAPI()
    app.include_router(create_router(Provider(bench.runtime)))
    return TestClient(app, raise_server_exceptions=False)


def tune(http, **changes):
    data = {"dataset_id": "rows", "batch_size": 2, "shuffle": True, "data_format": "dialog"}
    config = {"n_epochs": 1, "max_steps_per_epoch": 0, "data_config": data} | changes
    body = {"job_uuid": "j", "training_config": config, "hyperparam_search_config": {}, "logger_config": {}, "model": "tiny"}
    return http.post("/v1alpha/post-training/supervised-fine-tune", json=body)


def test_a_job_of_another_application_is_a_job_of_the_service(http, bench):
    source = {"type": "rows", "rows": ROWS}
    made = http.post("/v1beta/datasets", json={"purpose": "post-training/messages", "source": source, "dataset_id": "rows"})
    assert made.json()["identifier"] == "rows"
    assert tune(http).json()["job_uuid"] == "j"
    assert bench.runtime.services.jobs.get("j").job.state == "queued"
    assert http.get("/v1alpha/post-training/job/status", params={"job_uuid": "j"}).json()["status"] == "scheduled"
    taken = tune(http, n_epochs=2)
    assert (taken.status_code, "taken" in taken.json()["detail"]) == (409, True)


def test_errors(http):
    unknown = http.get("/v1alpha/post-training/jobs/nobodys/status")
    assert (unknown.status_code, "nobodys" in unknown.json()["detail"]) == (404, True)
    for changes, param in (({"dtype": "int3"}, "training_config.dtype"), ({"n_epochs": 0}, "training_config.n_epochs")):
        wrong = tune(http, **changes)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
