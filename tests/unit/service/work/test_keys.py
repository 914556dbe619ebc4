"""Keys at a running service: at once in every process, in no log and no file, and one set of everything for each owner."""

from __future__ import annotations

import io
import logging

import openai
import pytest
from fastapi.testclient import TestClient

from posttrain_service.api import auth
from posttrain_service.app import create_app
from posttrain_service.client import ApiError, Client, ServerGone
from posttrain_service.compose import build
from posttrain_service.domain.keys import Caller, make_key
from posttrain_service.errors import InvalidSettings, QuotaExceeded
from posttrain_service.logs import JsonFormatter, TextFormatter
from posttrain_service.settings import Settings
from posttrain_service.store.tables import metadata

JOBS = "/post_training/jobs"
BODY = {"model": "tiny", "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}}
BASE = "http://127.0.0.1:8484"


@pytest.fixture
def new_key(bench):
    def new(owner, scope="submit"):
        key, text = make_key(owner, scope, 0.0)
        bench.runtime.store.keys.insert(key)
        return key, text

    return new


@pytest.fixture
def http(bench, standing):
    app = create_app(bench.runtime.settings, build=lambda told: standing(bench.runtime))
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as client:
        yield client


def signed(text):
    return {"authorization": f"Bearer {text}"}


def test_without_keys_any_key_is_accepted(http):
    for headers in ({}, signed("none"), signed("pt_" + "0" * 16 + "_" + "a" * 43), {"authorization": "Basic eDp5"}):
        assert http.get(JOBS, headers=headers).status_code == 200
    assert http.post(JOBS, json=BODY, headers=signed("x")).status_code == 201


def test_the_first_key_closes_the_server_and_the_last_one_does_not_open_it(bench, http, new_key):
    job = http.post(JOBS, json=BODY).json()["job_uuid"]
    text = new_key("ann")[1]
    assert http.get(JOBS).status_code == 401
    assert http.get(JOBS, headers=signed(text)).json()["data"] == []  # what was made without keys is the owner default's
    assert [j["job_uuid"] for j in http.get(JOBS, headers=signed(new_key("default")[1])).json()["data"]] == [job]
    for one in bench.runtime.store.keys.all():
        bench.runtime.store.keys.revoke(one.id)
    assert http.get(JOBS, headers=signed(text)).json()["error"]["code"] == "invalid_api_key"
    assert http.get(JOBS).json()["error"]["code"] == "missing_api_key"


def test_a_revoked_key_is_refused_by_every_process_at_once(bench, http, new_key, standing):
    key, text = new_key("ann")
    second = build(bench.runtime.settings, backend=bench.backend, slots=("cpu:0",))
    try:
        app = create_app(second.settings, build=lambda told: standing(second))
        with TestClient(app, base_url=BASE) as other:
            assert [one.get(JOBS, headers=signed(text)).status_code for one in (http, other)] == [200, 200]
            second.store.keys.revoke(key.id)
            assert [one.get(JOBS, headers=signed(text)).status_code for one in (http, other)] == [401, 401]
    finally:
        second.store.close()


@pytest.mark.parametrize("header", ["{}", "Basic {}", "Bearer", "Bearer  ", "bearer x{}", "Bearer {} {}"])
def test_what_is_no_bearer_key(http, new_key, header):
    text = new_key("ann")[1]
    assert http.get(JOBS, headers={"authorization": header.format(text, text)}).status_code == 401
    assert http.get(JOBS, params={"api_key": text}).status_code == 401
    assert http.get(JOBS, headers=[("authorization", f"Bearer {text}")] * 2).status_code == 401
    assert http.get(JOBS, headers={"authorization": f"bearer  {text}"}).status_code == 200


def test_behind_a_path_prefix_the_same_paths_are_open(make_bench, standing):
    bench = make_bench(root_path="/train")
    key, text = make_key("ann", "submit", 0.0)
    bench.runtime.store.keys.insert(key)
    app = create_app(bench.runtime.settings, build=lambda told: standing(bench.runtime))
    with TestClient(app, base_url=BASE) as http:
        for prefix in ("/train", ""):
            assert http.get(f"{prefix}/health/live").status_code == 200
            assert http.get(f"{prefix}{JOBS}").status_code == 401
        assert http.get("/trainx/health/live").status_code == 401
        made = http.post(f"/train{JOBS}", json=BODY, headers=signed(text))
        assert http.get(made.headers["location"], headers=signed(text)).json() == made.json()
        assert made.headers["location"].startswith("/train/")
        assert http.get("/train/openapi.json").json()["servers"] == [{"url": "/train"}]


def test_foreign_pages_are_refused_with_a_key_too(http, new_key):
    headers = signed(new_key("ann")[1])
    assert http.get(JOBS, headers=headers | {"host": "evil.example"}).json()["error"]["code"] == "foreign_host"
    assert http.get(JOBS, headers=headers | {"origin": "http://evil.example"}).json()["error"]["code"] == "foreign_origin"


def test_a_stream_ends_when_its_key_is_revoked(bench, new_key, monkeypatch, serve):
    monkeypatch.setattr(auth, "RECHECK_S", 0.0)
    monkeypatch.setattr("posttrain_service.work.streams.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("posttrain_service.work.streams.POLL_S", 0.01)
    key, text = new_key("ann")
    with serve(bench) as address, Client(address, api_key=text) as client:
        job = client.create_job(BODY)["job_uuid"]
        events = client.stream(job, "events")
        assert next(events).data["type"] == "queued"
        bench.runtime.store.keys.revoke(key.id)
        with pytest.raises(ServerGone, match="before the job had ended"):
            list(events)
        with pytest.raises(ApiError) as refused:
            client.job(job)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_the_openai_client_tells_a_bad_key_from_a_weak_one(bench, http, new_key):
    transport = TestClient(http.app, base_url=BASE)
    (_, ann), (_, reader) = new_key("ann"), new_key("ann", "read")

    def client(key):
        return openai.OpenAI(api_key=key, base_url=f"{BASE}/v1", http_client=transport, max_retries=0)

    file = client(ann).files.create(file=("a.jsonl", b'{"prompt": "a", "completion": "b"}\n'), purpose="fine-tune")
    assert [one.id for one in client(reader).files.list()] == [file.id]
    with pytest.raises(openai.AuthenticationError) as unknown:
        client("sk-wrong").files.list()
    assert (unknown.value.code, unknown.value.type) == ("invalid_api_key", "authentication_error")
    with pytest.raises(openai.PermissionDeniedError, match="scope read") as weak:
        client(reader).fine_tuning.jobs.create(model="tiny", training_file=file.id)
    assert weak.value.code == "scope_insufficient"
    assert client(ann).fine_tuning.jobs.create(model="tiny", training_file=file.id).status == "validating_files"


def test_each_owner_has_idempotency_keys_and_numbers_of_their_own(http, new_key):
    (_, ann), (_, bob), (_, root) = new_key("ann"), new_key("bob"), new_key("eve", "admin")
    same = {"idempotency-key": "k"}
    made = [http.post(JOBS, json=BODY, headers=signed(key) | same) for key in (ann, bob, ann)]
    assert [answer.status_code for answer in made] == [201, 201, 200]
    assert made[0].json()["job_uuid"] == made[2].json()["job_uuid"] != made[1].json()["job_uuid"]

    def queued(key):
        text = http.get("/metrics", headers=signed(key)).text
        return next(line for line in text.splitlines() if line.startswith('posttrain_jobs{state="queued"}')).split()[-1]

    assert [queued(key) for key in (ann, bob, root)] == ["1.0", "1.0", "2.0"]


def test_a_quota_is_the_owners(make_bench):
    access = make_bench(owner_quota_bytes=100).runtime.services.access
    ann, bob = (access.services(Caller(owner, "submit")).files for owner in ("ann", "bob"))
    ann.create(io.BytesIO(b"x" * 99), filename="a", purpose="fine-tune")
    with pytest.raises(QuotaExceeded, match="owner 'ann' has 100 bytes"):
        ann.create(io.BytesIO(b"x"), filename="b", purpose="fine-tune")
    assert bob.create(io.BytesIO(b"x"), filename="b", purpose="fine-tune").owner == "bob"


def test_the_secret_is_in_no_file_and_no_log(bench, http, new_key, caplog):
    _, text = new_key("ann")
    secret = text.split("_", 2)[2]
    with caplog.at_level(logging.DEBUG):
        headers = signed(text)
        http.post(JOBS, json=BODY, headers=headers | {"idempotency-key": "k"})
        http.post(JOBS, json={"model": "nothing"}, headers=headers)
        http.get(JOBS, headers=signed(text[:-1]))
        http.get("/metrics", headers=headers)
        bench.rounds(2)
    logging.getLogger("posttrain_service").warning("GET /x?api_key=%s", text)
    lines = [formatter.format(record) for record in caplog.records for formatter in (TextFormatter(), JsonFormatter())]
    assert any("api_key=pt_" in line for line in lines)
    assert not [line for line in lines if secret in line]
    with bench.runtime.store.database.read() as connection:
        rows = [row for table in metadata.sorted_tables for row in connection.execute(table.select())]
    assert rows
    assert not [row for row in rows if secret in repr(row)]
    files = [path for path in bench.runtime.settings.storage_dir.rglob("*") if path.is_file()]
    on_sqlite = bench.runtime.store.database.engine.dialect.name == "sqlite"
    assert any(path.name.startswith("posttrain.db") for path in files) == on_sqlite
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_an_address_that_others_reach_needs_a_key_first(tmp_path, standing):
    settings = Settings(storage_dir=tmp_path, host="0.0.0.0", disk_reserve_bytes=0)
    with pytest.raises(InvalidSettings, match="posttrain keys create"):
        create_app(settings)
    assert list(tmp_path.iterdir()) == []  # looking makes nothing
    runtime = build(settings.model_copy(update={"host": "127.0.0.1"}), slots=("cpu:0",))
    key, text = make_key("ann", "submit", 0.0)
    with pytest.raises(InvalidSettings, match="posttrain keys create"):
        create_app(settings)
    runtime.store.keys.insert(key)
    open_services = build(settings, slots=("cpu:0",))
    try:
        with TestClient(create_app(settings, build=lambda told: standing(open_services)), base_url="http://gpu-box") as http:
            assert http.get(JOBS).status_code == 401
            assert http.get(JOBS, headers=signed(text)).status_code == 200
            runtime.store.keys.revoke(key.id)
            assert http.get(JOBS, headers=signed(text)).status_code == 401
            assert http.get("/health/live").status_code == 200
        with pytest.raises(InvalidSettings, match="posttrain keys create"):
            create_app(settings)  # no key is good any more
    finally:
        open_services.store.close()
        runtime.store.close()
