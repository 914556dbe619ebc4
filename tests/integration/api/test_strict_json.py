"""JSON bodies are read strictly, and faults are told by the path that the caller wrote, in every face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from posttrain_service.api.strict_json import StrictRoute
from posttrain_service.app import create_app
from posttrain_service.settings import Settings

JOBS, TUNING, UPLOADS = "/post_training/jobs", "/v1/fine_tuning/jobs", "/v1/uploads"
VALIDATE = "/post_training/datasets/validate"
NATIVE = {"model": "m", "dataset": "f"}
OPENAI = {"model": "m", "training_file": "file-1"}
UPLOAD = {"bytes": 5, "filename": "a.jsonl", "purpose": "fine-tune", "mime_type": "text/plain"}


def routes_in(routes: Any) -> Iterator[APIRoute]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif hasattr(route, "original_router"):
            yield from routes_in(route.original_router.routes)


def test_every_route_with_a_json_body_reads_it_strictly():
    found = [route for route in routes_in(create_app(Settings(host="127.0.0.1")).routes) if route.body_field is not None]
    assert len(found) >= 5
    assert [route.path for route in found if not isinstance(route, StrictRoute)] == []


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        (JOBS, '{"model": "m", "model": "n", "dataset": "f"}', "model"),
        (JOBS, '{"model": "m", "dataset": "f", "training": {"num_epochs": 1, "num_epochs": 2}}', "num_epochs"),
        (JOBS, '{"model": "m", "dataset": {"rows": [{"text": "a", "text": "a"}]}}', "text"),
        (VALIDATE, '{"dataset": "f", "dataset": "f"}', "dataset"),
        (TUNING, '{"model": "m", "training_file": "f", "seed": 1, "seed": 2}', "seed"),
        (UPLOADS, '{"bytes": 1, "bytes": 2}', "bytes"),
        (f"{UPLOADS}/u/complete", '{"part_ids": [], "part_ids": ["a"]}', "part_ids"),
    ],
)
def test_a_key_that_stands_twice_is_no_json(http, path, body, key):
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert f"the key {key!r} stands twice" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (JOBS, NATIVE | {"dataset": {"rows": [{}], "x": 1}}, "dataset.x", "dataset.x: no such field"),
        (JOBS, NATIVE | {"resources": {"devices": True}}, "resources.devices", "must be a number, not true"),
        (JOBS, NATIVE | {"training": {"merge_lora": True}}, "training.merge_lora", "training.merge_lora needs adapter"),
        (JOBS, NATIVE | {"retention": {"keep": True, "ttl_s": 9}}, "retention.ttl_s", "retention.ttl_s (9) and retention.keep"),
        (VALIDATE, {"dataset": {"rows": [{}], "x": 1}}, "dataset.x", "dataset.x: no such field"),
        (VALIDATE, {"dataset": "f", "train_on": "all", "method": {"kind": "dpo"}}, "train_on", "train_on has no effect with method 'dpo'"),
        (TUNING, OPENAI | {"seed": True}, "seed", "must be a number, not true"),
        (TUNING, OPENAI | {"hyperparameters": {"n_epochs": True}}, "hyperparameters.n_epochs", "must be a number, not true"),
        (TUNING, OPENAI | {"resources": {"devices": [True]}}, "resources.devices.0", "must be a number, not true"),
        (UPLOADS, UPLOAD | {"bytes": True}, "bytes", "must be a number, not true"),
        (UPLOADS, UPLOAD | {"expires_after": {"anchor": "created_at", "seconds": True}}, "expires_after.seconds", "must be a number"),
    ],
)
def test_a_fault_is_told_by_the_path_that_the_caller_wrote(http, path, body, param, text):
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["errors"][0]["loc"]) == (422, param, param)
    assert text in error["message"]
