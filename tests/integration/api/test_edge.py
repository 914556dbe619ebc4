"""What holds for every route: the envelope, the request id, who may call, and the lifespan."""

import json
import logging
import re

import pytest
from fastapi.testclient import TestClient

from posttrain_service import errors
from posttrain_service.api.edge import MAX_JSON_BYTES, is_loopback_host
from posttrain_service.api.errors import status_of
from posttrain_service.app import create_app
from posttrain_service.errors import InvalidSettings
from posttrain_service.logs import JsonFormatter
from posttrain_service.settings import Settings
from posttrain_service.wire.shapes import Error, Health, Version

JOBS = "/post_training/jobs"
BODY = {"model": "m", "dataset": "file-1"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("PUT", JOBS, 405),
        ("POST", "/v1/files/x", 405),
        ("GET", f"{JOBS}/a/b/c/d", 404),
        ("POST", JOBS, 415),
        ("GET", f"{JOBS}?limit=x", 422),
        ("GET", f"{JOBS}/..%2f..%2fetc", 404),
        ("GET", f"{JOBS}/a%00b", 404),
        ("GET", f"{JOBS}/{'x' * 5000}", 404),
    ],
)
def test_every_error_has_the_envelope(http, method, path, status):
    answer = http.request(method, path)
    assert answer.status_code == status
    Error.model_validate(answer.json())
    assert answer.headers["x-request-id"].startswith("req-")
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (errors.InvalidRequest("m"), 422, {"x-should-retry": "false"}),
        (errors.Unauthorized("m"), 401, {}),
        (errors.Forbidden("m"), 403, {}),
        (errors.NotFound("m"), 404, {}),
        (errors.Conflict("m"), 409, {"x-should-retry": "false"}),
        (errors.PayloadTooLarge("m"), 413, {}),
        (errors.QuotaExceeded("m", retry_after_s=2.1), 429, {"retry-after": "3", "x-should-retry": "true"}),
        (errors.StoreBusy("m"), 503, {"retry-after": "1", "x-should-retry": "true"}),
        (errors.Unavailable("m"), 503, {"retry-after": "5"}),
        (errors.StoreMismatch("m"), 503, {"x-should-retry": "false"}),
        (errors.DiskFull("m"), 507, {"x-should-retry": "false"}),
        (errors.LaunchFailed("m"), 500, {"x-should-retry": "false"}),
    ],
)
def test_statuses_of_the_services_errors(http, fake, monkeypatch, error, status, headers):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(fake.services.jobs, "get", fail)
    answer = http.get(f"{JOBS}/x")
    assert answer.status_code == status == status_of(error)
    assert answer.json()["error"] == {"message": "m", "type": answer.json()["error"]["type"], "param": None, "code": error.code, "request_id": answer.headers["x-request-id"]}
    for name, value in headers.items():
        assert answer.headers[name] == value


def test_single_faults_are_listed(http, fake, monkeypatch):
    def fail(*args, **kwargs):
        raise errors.InvalidRequest("2 bad rows", param="dataset", errors=[{"line": 3, "loc": "messages", "message": "empty"}])

    monkeypatch.setattr(fake.services.jobs, "create", fail)
    error = http.post(JOBS, json=BODY).json()["error"]
    assert (error["param"], error["errors"]) == ("dataset", [{"line": 3, "loc": "messages", "message": "empty"}])


def test_what_was_not_foreseen_tells_nothing_and_is_logged(http, fake, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("secret path /home/x")

    monkeypatch.setattr(fake.services.jobs, "get", fail)
    with caplog.at_level(logging.ERROR):
        answer = http.get(f"{JOBS}/x", headers={"x-request-id": "my-id.1"})
    assert answer.status_code == 500
    Error.model_validate(answer.json())
    assert (answer.json()["error"]["code"], answer.headers["x-should-retry"]) == ("internal_error", "false")
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert "my-id.1" in answer.json()["error"]["message"]
    assert "secret path" in caplog.text


def test_each_request_is_one_line_of_the_log_with_its_ids(http, fake, caplog):
    made = http.post(JOBS, json=BODY).json()["job_uuid"]
    with caplog.at_level(logging.DEBUG, logger="posttrain_service"):
        told = http.get(f"{JOBS}/{made}?x=secret", headers={"x-request-id": "one"})
        http.get(f"{JOBS}/{made}", headers={"x-request-id": "two"})
        http.get("/health/live", headers={"x-request-id": "three"})
    assert told.json()["error"]["request_id"] == "one"
    found = {record.posttrain_fields["path"]: record for record in caplog.records if record.name == "posttrain_service.api.access"}
    line = found[f"{JOBS}/{made}"]
    assert line.levelname == "INFO"
    assert found["/health/live"].levelname == "DEBUG"
    values = line.posttrain_fields
    assert (values["status"], values["route"], values["job"], values["method"]) == (200, JOBS + "/{job_uuid}", made, "GET")
    assert values["duration_ms"] >= 0
    assert "secret" not in line.getMessage() + str(values)


def test_what_a_route_logs_names_request_and_job(http, fake, monkeypatch, caplog):
    def shows(job_uuid):
        logging.getLogger("posttrain_service.x").info("inside")
        raise RuntimeError("secret path")

    lines = []
    monkeypatch.setattr(fake.services.jobs, "get", shows)
    formatted = logging.Handler()
    formatted.emit = lambda record: lines.append(json.loads(JsonFormatter().format(record)))
    service = logging.getLogger("posttrain_service")
    monkeypatch.setattr(service, "handlers", [formatted])
    with caplog.at_level(logging.INFO, logger="posttrain_service"):
        answer = http.get(f"{JOBS}/j1", headers={"x-request-id": "r1"})
    assert answer.json()["error"]["request_id"] == "r1"
    assert [(line["message"].split(":")[0], line["request"], line["job"]) for line in lines] == [
        ("inside", "r1", "j1"), (f"GET {JOBS}/j1 failed", "r1", "j1"), (f"GET {JOBS}/j1", "r1", "j1"),
    ]  # fmt: skip
    assert lines[-1]["status"] == 500


def test_a_misspelt_field_is_told_with_the_one_that_was_meant(http):
    answer = http.post(JOBS, json=BODY | {"training": {"learning_rat": 1e-4}, "modle": "m"})
    found = {fault["loc"]: fault["message"] for fault in answer.json()["error"]["errors"]}
    assert found["training.learning_rat"] == "no such field; did you mean training.learning_rate?"
    assert found["modle"] == "no such field; did you mean model?"


@pytest.mark.parametrize(("field", "empty"), [("dataset", ""), ("model", ""), ("dataset.rows", [])])
def test_an_empty_value_is_one_sentence(http, field, empty):
    body = BODY | ({"dataset": {"rows": empty}} if "." in field else {field: empty})
    error = http.post(JOBS, json=body).json()["error"]
    assert error["errors"] == [{"loc": field, "message": "must not be empty"}]
    assert error["message"] == f"{field}: must not be empty"


def test_request_ids(http):
    assert http.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [http.get("/version", headers={"x-request-id": sent}).headers["x-request-id"] for sent in ("", "a b", "x" * 129)]
    assert all(re.fullmatch(r"req-[0-9a-f]{32}", one) for one in made)
    assert len(set(made)) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8484", "localhost:1", "LOCALHOST", "[::1]:8484", "127.9.9.9"])
def test_own_names(http, host):
    assert http.get("/version", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8484", "127.0.0.1.evil.example", "", "10.0.0.1", "[", "localhost@evil.example:80"])
def test_foreign_hosts_are_refused(http, fake, host):
    answer = http.post(JOBS, json=BODY, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host")
    assert answer.headers["x-request-id"]
    assert not fake.services.jobs.jobs


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1.evil.example", "null", "file://", ""])
def test_foreign_pages_are_refused(http, fake, origin):
    answer = http.post(JOBS, json=BODY, headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert not fake.services.jobs.jobs
    assert http.post(JOBS, json=BODY, headers={"origin": "http://localhost:3000"}).status_code == 201


@pytest.mark.parametrize(
    ("host", "answer"),
    [("localhost", True), ("localhost.", True), ("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("", False), ("a.b", False)],
)
def test_loopback_names(host, answer):
    assert is_loopback_host(host) is answer


def test_bodies_have_an_end(http, fake):
    chunk = b" " * (1024 * 1024)
    body = (chunk for _ in range(MAX_JSON_BYTES // len(chunk) + 1))
    answer = http.post(JOBS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    Error.model_validate(answer.json())


def test_health_and_version(http, fake):
    Health.model_validate(http.get("/health/live").json())
    assert http.get("/health/ready").status_code == 200
    fake.services.health.good = False
    answer = http.get("/health/ready")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["disk"])
    Version.model_validate(http.get("/version").json())
    assert http.get("/version", params={"x": 1}).status_code == 422


def test_prometheus(http):
    answer = http.get("/metrics", headers={"accept": "text/plain"})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text == "# text/plain\n"


def test_dataset_validation(http, fake):
    body = {"dataset": {"rows": [{"messages": []}]}, "model": "m", "method": {"kind": "sft"}}
    answer = http.post("/post_training/datasets/validate", json=body)
    assert (answer.status_code, answer.json()["num_errors"]) == (200, 1)
    assert fake.services.datasets.asked == ({"rows": [{"messages": []}]}, "m", {"kind": "sft"})
    assert http.post("/post_training/datasets/validate", json={"dataset": "file-1"}).status_code == 200
    assert fake.services.datasets.asked == ("file-1", None, None)
    for bad in ({}, {"dataset": "f", "x": 1}, {"dataset": "f", "method": {"kind": "astrology"}}):
        assert http.post("/post_training/datasets/validate", json=bad).status_code == 422


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu-box"])
def test_an_open_address_is_refused_without_keys(host):
    with pytest.raises(InvalidSettings, match="API keys"):
        create_app(Settings(host=host))


def test_the_loops_run_as_long_as_the_application(fake, settings):
    app = create_app(settings, build=lambda told: fake)
    assert fake.started == 0
    with TestClient(app, base_url="http://localhost"):
        assert (fake.started, fake.stopped) == (1, 0)
    assert (fake.started, fake.stopped) == (1, 1)
    assert fake.services.streams.closed.is_set()


def test_loops_that_fail_to_start_stop_the_server(fake, settings, monkeypatch):
    def fail():
        raise RuntimeError("no start")

    monkeypatch.setattr(fake, "start", fail)
    app = create_app(settings, build=lambda told: fake)
    with pytest.raises(RuntimeError, match="no start"), TestClient(app, base_url="http://localhost"):
        raise AssertionError("it must not serve")
    assert fake.stopped == 1
