"""Creating, reading, listing and the verbs of jobs over HTTP."""

import dataclasses

import pytest

from posttrain_service.domain.lifecycle import EndReason, JobState
from posttrain_service.wire.shapes import Error, EventList, Job, JobList, Plan

JOBS = "/post_training/jobs"
BODY = {"model": "m", "dataset": "file-1"}


def test_create_and_get(http, fake):
    made = http.post(JOBS, json={**BODY, "name": "n", "metadata": {"team": "x"}})
    assert made.status_code == 201
    job = made.json()
    Job.model_validate(job)
    assert (job["status"], job["name"], job["metadata"]) == ("queued", "n", {"team": "x"})
    assert job["created_at"] == "2023-11-14T22:13:20.250000Z"
    assert made.headers["location"] == f"{JOBS}/{job['job_uuid']}"
    assert http.get(made.headers["location"]).json() == job


def test_the_same_request_again_is_the_same_job(http, fake):
    named = {**BODY, "job_uuid": "mine"}
    assert http.post(JOBS, json=named).status_code == 201
    again = http.post(JOBS, json=named)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
    other = http.post(JOBS, json={**named, "model": "other"})
    assert (other.status_code, other.headers["x-should-retry"]) == (409, "false")

    key = {"Idempotency-Key": "k"}
    first = http.post(JOBS, json=BODY, headers=key)
    assert (first.status_code, http.post(JOBS, json=BODY, headers=key).json()) == (201, first.json())
    assert http.post(JOBS, json={**BODY, "model": "x"}, headers=key).status_code == 422
    assert len(fake.services.jobs.jobs) == 2


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "tab\t"])
def test_unusable_idempotency_keys(http, fake, key):
    answer = http.post(JOBS, json=BODY, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "Idempotency-Key")
    assert not fake.services.jobs.jobs


def test_dry_run_stores_nothing(http, fake):
    answer = http.post(JOBS, json=BODY, params={"dry_run": "true"})
    assert answer.status_code == 200
    Plan.model_validate(answer.json())
    assert not fake.services.jobs.jobs


def test_a_misspelt_dry_run_starts_nothing(http, fake):
    answer = http.post(JOBS, json=BODY, params={"dryrun": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "dryrun")
    assert not fake.services.jobs.jobs


def test_every_fault_is_listed_with_its_path(http):
    answer = http.post(JOBS, json={**BODY, "training": {"num_epochs": 0, "learning_rate": "abc"}, "modle": 1})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "invalid_request"
    found = {item["loc"]: item["message"] for item in error["errors"]}
    assert set(found) == {"training.num_epochs", "training.learning_rate", "modle"}
    assert "got 'abc'" in found["training.learning_rate"]
    assert "3" in error["message"] or "2 more errors" in error["message"]
    assert answer.json()["detail"] == error["message"]


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b'{"model": "m", "dataset": "f"}', "text/plain", 415, "unsupported_media_type"),
        (b'{"model": "m", "dataset": "f"}', "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b"[]", "application/json", 422, "invalid_request"),
        (b'{"model": "\\ud800", "dataset": "f"}', "application/json", 422, "invalid_request"),
        (b'{"model": "m", "dataset": "f", "\\udfff": 1}', "application/json", 422, "invalid_request"),
        (b'{"model": "m", "dataset": "f", "resources": {"max_duration_s": NaN}}', "application/json", 422, "invalid_request"),
        (b'{"model": "\xff"}', "application/json", 400, "invalid_json"),
        (b'{"a": ' + b"1" * 5000 + b"}", "application/json", 400, "invalid_json"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b'{"model": "m", "dataset": "f", "model": "n"}', "application/json", 400, "invalid_json"),
        (b'{"model": "m", "dataset": {"rows": [{"text": "a", "text": "b"}]}}', "application/json", 400, "invalid_json"),
    ],
)
def test_bodies_that_are_no_request(http, fake, content, kind, status, code):
    answer = http.post(JOBS, content=content, headers={"content-type": kind})
    assert answer.status_code == status
    Error.model_validate(answer.json())
    assert code in (None, answer.json()["error"]["code"])
    assert not fake.services.jobs.jobs


def test_an_empty_body_is_called_one(http):
    answer = http.post(JOBS, content=b"", headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "the request has no body; send JSON"


def test_list_pages_filters_and_never_ends_in_a_loop(http, fake):
    for number in range(5):
        http.post(JOBS, json={**BODY, "job_uuid": f"j{number}", "metadata": {"n": str(number % 2)}})
    seen, after = [], None
    while True:
        page = http.get(JOBS, params={"limit": 2, **({"after": after} if after else {})}).json()
        JobList.model_validate(page)
        seen += [job["job_uuid"] for job in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert seen == ["j4", "j3", "j2", "j1", "j0"]
    found = http.get(JOBS, params={"metadata[n]": "1"}).json()
    assert [job["job_uuid"] for job in found["data"]] == ["j3", "j1"]
    assert http.get(JOBS, params=[("status", "queued"), ("status", "running")]).json()["data"]
    assert fake.services.jobs.calls[-1][1]["status"] == ["queued", "running"]
    assert http.get(JOBS, params={"status": "failed"}).json() == {
        "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "query",
    [
        {"status": "done"}, {"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "asc"}, {"metadata": "x"},
        {"metadata[]": "x"}, {"after": "a", "before": "b"},
    ],
)  # fmt: skip
def test_queries_that_mean_nothing_are_refused(http, query):
    answer = http.get(JOBS, params=query)
    assert answer.status_code == 422
    Error.model_validate(answer.json())


def test_verbs(http, job):
    uuid = job["job_uuid"]
    do = lambda verb: http.post(f"{JOBS}/{uuid}/{verb}", headers={"content-type": "application/json"})  # noqa: E731
    assert do("pause").json()["status"] == "paused"
    assert do("pause").status_code == 200
    assert do("retry").status_code == 409
    assert do("resume").json()["status"] == "queued"
    assert do("cancel").json()["status"] == "cancelled"
    assert do("cancel").status_code == 200
    refused = do("pause")
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    assert refused.json()["error"]["code"] == "cannot_pause"
    assert do("retry").json()["status"] == "queued"
    assert http.delete(f"{JOBS}/{uuid}").status_code == 409
    do("cancel")
    gone = http.delete(f"{JOBS}/{uuid}")
    assert (gone.status_code, gone.content) == (204, b"")
    missing = http.get(f"{JOBS}/{uuid}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "job_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""), ("POST", "/cancel"), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/retry"), ("DELETE", ""),
        ("GET", "/events"), ("GET", "/logs"), ("GET", "/metrics"), ("GET", "/checkpoints"),
        ("GET", "/checkpoints/step-000001"), ("GET", "/checkpoints/step-000001/archive"),
        ("GET", "/checkpoints/step-000001/files/model/x"), ("DELETE", "/checkpoints/step-000001"),
    ],
)  # fmt: skip
def test_unknown_jobs_are_404_everywhere(http, method, path):
    for accept in ("application/json", "text/event-stream, */*"):
        answer = http.request(method, f"{JOBS}/nobody{path}", headers={"accept": accept})
        assert answer.status_code == 404
        Error.model_validate(answer.json())


def test_a_job_in_full(http, fake, job):
    jobs = fake.services.jobs
    error = {"code": "invalid_data", "message": "bad rows", "rank": 0, "retryable": False, "details": {"errors": [{"line": 2, "message": "x"}]}}
    jobs.jobs["j"] = dataclasses.replace(
        jobs.jobs["j"], state=JobState.FAILED, reason=EndReason.INVALID_DATA, error=error, ended_at=5.0, warnings=["w"]
    )
    jobs.views["j"] = {
        "progress": {"step": 1, "total_steps": 2, "percent": 50.0, "eta_s": float("inf"), "time": 3.0},
        "metrics": {"v": 1, "step": 1, "epoch": 0.5, "time": 3.0, "loss": float("nan")},
        "checkpoints": [
            {"id": "step-000001", "step": 1, "epoch": 1.0, "created_at": 4.0, "size_bytes": 3, "files": [],
             "metrics": {"loss": float("nan")}, "kind": "full", "best": False}
        ],
        "resources": {"devices": ["cpu:0"]},
    }  # fmt: skip
    shown = http.get(f"{JOBS}/j").json()
    Job.model_validate(shown)
    assert shown["error"] == {"code": "invalid_data", "message": "bad rows", "rank": 0, "log_tail": None, "errors": [{"line": 2, "message": "x"}]}
    assert (shown["reason"], shown["completed_at"]) == ("invalid_data", "1970-01-01T00:00:05.000000Z")
    assert shown["progress"]["eta_s"] is None
    assert shown["metrics"] == {"step": 1, "epoch": 0.5, "time": "1970-01-01T00:00:03.000000Z", "loss": None}
    assert shown["checkpoints"][0]["metrics"] == {"loss": None}


def test_events_in_pages(http, job):
    first = http.get(f"{JOBS}/j/events", params={"limit": 2}).json()
    EventList.model_validate(first)
    assert ([e["id"] for e in first["data"]], first["has_more"]) == (["1", "2"], True)
    rest = http.get(f"{JOBS}/j/events", params={"after": first["last_id"]}).json()
    assert ([e["id"] for e in rest["data"]], rest["has_more"]) == (["3", "4", "5"], False)
    newest = http.get(f"{JOBS}/j/events", params={"order": "desc", "limit": 1}).json()
    assert newest["data"][0]["id"] == "5"
