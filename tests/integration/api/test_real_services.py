"""HTTP over the real store, queue, shim and streams; a short script stands in for torchrun and its one rank."""

import hashlib
import json
import sys
import tarfile
import threading
import time

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from posttrain_service.app import create_app
from posttrain_service.client import ApiError, Client, ServerGone
from posttrain_service.errors import InvalidRequest
from posttrain_service.settings import Settings
from posttrain_service.wire import shapes
from posttrain_service.wire.datasets import DatasetReport
from posttrain_trainer.contract import proc

JOBS = "/post_training/jobs"

STAND_IN = '''#!{python}
import hashlib, json, sys, time
from pathlib import Path
from posttrain_trainer.contract.locks import Lock
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, read_json, write_json

if sys.argv[-1] in ("estimate", "inspect", "version"):
    answers = {{"estimate": {{"memory": {{"per_rank_bytes": 1, "total_bytes": 1, "fits": True}}, "parameters": 10, "trainable": 10,
                            "steps": 4, "tokens": 40}},
               "inspect": {{"rows": 1, "tokens": 7, "supervised_tokens": 3, "max_len": 7, "dropped": {{}}}},
               "version": {{"version": "0", "contract": 1}}}}
    print(json.dumps(answers[sys.argv[-1]]))
    sys.exit(0)
attempt = AttemptDir(Path(sys.argv[-1]))
run = RunDir(attempt.path.parent.parent)
lock = Lock(attempt.run_lock, shared=True)
log = attempt.rank_log(0).open("a", buffering=1)
for step in range(1, 5):
    now = time.time()
    with attempt.metrics.open("a") as file:
        file.write(json.dumps({{"v": 1, "attempt": attempt.number, "step": step, "epoch": step / 4, "time": now, "loss": 1 / step}}) + "\\n")
    write_json(attempt.heartbeat, {{"time": now, "phase": "train", "step": step, "total_steps": 4, "epoch": step / 4}}, durable=False)
    print("step", step, chr(0x2713), file=log)
    while step == 2 and not (run.path / "go").exists():
        time.sleep(0.01)
folder = run.checkpoint("step-000004")
(folder / "model").mkdir(parents=True)
(folder / "model" / "weights").write_bytes(b"w" * 100_000)
(run.path / "secret").write_text("hidden words")
files = [{{"path": "model/weights", "size_bytes": 100_000, "sha256": hashlib.sha256(b"w" * 100_000).hexdigest()}}]
write_json(folder / "manifest.json", {{
    "v": 1, "id": "step-000004", "step": 4, "epoch": 1.0, "samples_seen": 4, "tokens_seen": 40, "attempt": 1, "created_at": time.time(),
    "kind": "full", "trigger": "end", "metrics": {{"loss": 0.25}}, "arguments_digest": "x", "files": files}})
write_json(attempt.result, {{"status": "completed", "steps": 4, "total_steps": 4, "epochs": 1.0, "samples_seen": 4, "tokens_seen": 40,
                            "train_time_s": 0.1, "warnings": []}})
'''
ROWS = b'{"prompt": "a", "completion": "b"}\n' * 3


@pytest.fixture
def settings(tmp_path):
    python = tmp_path / "stand-in"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    model = tmp_path / "storage/models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    return Settings(storage_dir=tmp_path / "storage", trainer_python=python, disk_reserve_bytes=0, stop_grace_s=5)


@pytest.fixture
def http(settings):
    app = create_app(settings)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client
    for folder in settings.jobs_dir.iterdir():
        assert proc.kill_marked(folder.name).left == ()


@pytest.fixture
def real(settings, serving):
    """The real service under uvicorn; its address."""
    with serving(create_app(settings)) as address:
        yield address
    for folder in settings.jobs_dir.iterdir():
        assert proc.kill_marked(folder.name).left == ()


def go(settings, job_uuid):
    (settings.jobs_dir / job_uuid / "go").touch()


@pytest.mark.slow
def test_a_whole_life_over_http(real, settings, tmp_path):
    with Client(real) as client:
        rows = tmp_path / "rows.jsonl"
        rows.write_bytes(ROWS)
        file = client.upload(rows)
        assert client.validate(file["id"], model="tiny")["tokens"]["tokens"] == 7
        request = {"model": "tiny", "dataset": file["id"], "metadata": {"team": "x"}, "training": {"num_epochs": 1}}
        plan = client.plan(request)
        shapes.Plan.model_validate(plan)
        assert (plan["steps"], plan["memory"]["fits"], plan["dataset"]["rows"]) == (4, True, 3)
        assert list(client.jobs()) == []

        job = client.create_job(request)
        uuid = job["job_uuid"]
        shapes.Job.model_validate(job)
        with pytest.raises(ApiError) as caught:
            client.delete_file(file["id"])
        assert caught.value.status == 409

        # Two steps of the metrics arrive while the run waits; a second stream goes on where the first one stood.
        seen = []
        for event in client.stream(uuid, "metrics"):
            seen.append(event)
            if event.data["step"] == 2:
                break
        shapes.Job.model_validate(client.job(uuid))
        assert client.job(uuid)["progress"]["step"] == 2
        assert next(client.stream(uuid, "logs")).data["text"].startswith("step 1 \u2713\n")
        go(settings, uuid)
        rest = list(client.stream(uuid, "metrics", after=seen[-1].id))
        assert [e.data["step"] for e in [*seen, *rest][:-1]] == [1, 2, 3, 4]
        assert (rest[-1].event, rest[-1].data) == ("end", {"status": "succeeded", "reason": "completed"})
        assert [p["loss"] for p in client.metrics(uuid)] == [1.0, 0.5, 1 / 3, 0.25]

        text = "".join(f"step {n} \u2713\n" for n in range(1, 5))
        assert client.logs(uuid) == text
        assert client.logs(uuid, tail=1) == "step 4 \u2713\n"
        log = list(client.stream(uuid, "logs"))
        assert "".join(e.data["text"] for e in log[:-1]) == text
        events = list(client.events(uuid))
        assert [e["id"] for e in events] == [e.id for e in client.stream(uuid, "events") if e.event == "event"]
        for event in events:
            shapes.Event.model_validate(event)

        [checkpoint] = client.checkpoints(uuid)
        shapes.Checkpoint.model_validate(checkpoint)
        tar = client.download_checkpoint(uuid, checkpoint["id"], tmp_path / "out.tar")
        with tarfile.open(tar) as archive:
            content = archive.extractfile(f"{uuid}-step-000004/model/weights").read()
        assert hashlib.sha256(content).hexdigest() == checkpoint["files"][0]["sha256"]

        done = client.job(uuid)
        shapes.Job.model_validate(done)
        assert (done["status"], done["reason"], done["error"]) == ("succeeded", "completed", None)
        with pytest.raises(ApiError, match="it is succeeded"):
            client.cancel(uuid)
        client.delete_job(uuid)
        client.delete_file(file["id"])
        assert list(client.jobs()) == []


@pytest.mark.slow
def test_only_the_checkpoints_files_leave(http, settings):
    uuid = http.post(JOBS, json={"model": "tiny", "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}}).json()["job_uuid"]
    go(settings, uuid)
    with http.stream("GET", f"{JOBS}/{uuid}/events", headers={"accept": "text/event-stream"}) as stream:
        assert b"event: end" in b"".join(stream.iter_bytes())
    files = f"{JOBS}/{uuid}/checkpoints/step-000004/files"
    assert http.get(f"{files}/model/weights", headers={"range": "bytes=99998-"}).content == b"ww"
    for path in ("../../secret", "..%2f..%2fsecret", "manifest.json", "model", "model/../manifest.json", "/etc/passwd", "%00"):
        answer = http.get(f"{files}/{path}")
        assert answer.status_code in (404, 422), path
        assert "hidden words" not in answer.text
    # A link that somebody put in place of a file is not followed, neither alone nor in the archive.
    weights = settings.jobs_dir / uuid / "checkpoints/step-000004/model/weights"
    weights.unlink()
    weights.symlink_to(settings.jobs_dir / uuid / "secret")
    assert http.get(f"{files}/model/weights").status_code == 404
    assert http.get(f"{JOBS}/{uuid}/checkpoints/step-000004/archive").status_code == 404


def test_refusals_before_anything_is_stored(http, settings):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"messages": []}]
    answer = http.post(JOBS, json={"model": "tiny", "dataset": {"rows": rows}})
    assert answer.status_code == 422
    assert [item["line"] for item in answer.json()["error"]["errors"]] == [2, 3]
    for body, param in (
        ({"model": "nothing", "dataset": "x"}, "model"),
        ({"model": "../tiny", "dataset": "x"}, "model"),
        ({"model": "tiny", "dataset": "file-" + "0" * 32}, "dataset"),
        ({"model": "tiny", "dataset": "../../etc/passwd"}, "dataset"),
        ({"model": "tiny", "dataset": {"rows": rows[:1]}, "training": {"max_seq_len": 1000}}, "training.max_seq_len"),
        ({"model": "tiny", "dataset": {"rows": rows[:1]}, "resources": {"devices": 50}}, "resources.devices"),
    ):
        answer = http.post(JOBS, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), answer.text
        assert str(settings.storage_dir) not in answer.text
    assert http.get(JOBS).json()["data"] == []
    assert list(settings.jobs_dir.iterdir()) == []
    report = http.post("/post_training/datasets/validate", json={"dataset": {"rows": rows}})
    DatasetReport.model_validate(report.json())
    assert (report.status_code, report.json()["valid"], report.json()["num_errors"]) == (200, False, 2)


@pytest.mark.slow
def test_identity_survives_a_restart(settings):
    body = {"model": "tiny", "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}, "metadata": {"n": "1"}}
    key, ids = {"Idempotency-Key": "k1"}, set()
    for _ in range(2):
        with TestClient(create_app(settings), base_url="http://127.0.0.1") as http:
            answers = [None] * 8

            def post(number, http=http, answers=answers):
                answers[number] = http.post(JOBS, json=body, headers=key)

            threads = [threading.Thread(target=post, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert {answer.status_code for answer in answers} <= {200, 201}
            ids |= {answer.json()["job_uuid"] for answer in answers}
            assert http.post(JOBS, json={**body, "name": "x"}, headers=key).status_code == 422
            named = [http.post(JOBS, json={**body, "job_uuid": "mine"}).status_code for _ in range(2)]
            assert named in ([201, 200], [200, 200])
            assert http.post(JOBS, json={**body, "job_uuid": "mine", "name": "x"}).status_code == 409
            assert [job["job_uuid"] for job in http.get(JOBS, params={"metadata[n]": "1"}).json()["data"]] == ["mine", *ids]
    assert len(ids) == 1
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as http:
        for uuid in ("mine", *ids):
            assert http.post(f"{JOBS}/{uuid}/cancel").status_code == 200
            assert http.post(f"{JOBS}/{uuid}/cancel").status_code == 200
            with http.stream("GET", f"{JOBS}/{uuid}/events", headers={"accept": "text/event-stream"}) as stream:
                assert b'"status":"cancelled"' in b"".join(stream.iter_bytes())


def test_files_by_the_openai_client(real):
    with openai.OpenAI(api_key="none", base_url=f"{real}/v1", max_retries=0) as client:
        ids = [client.files.create(file=("a.jsonl", ROWS), purpose="fine-tune").id for _ in range(3)]
        assert [file.id for file in client.files.list(limit=1)] == ids[::-1]
        assert client.files.content(ids[0]).read() == ROWS
        assert client.files.delete(ids[0]).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(ids[0])
        # A form whose late fields are wrong leaves neither a row nor bytes.
        body = (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--b--\r\n'
        )
        answer = httpx.post(f"{real}/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
        assert answer.status_code == 422
        assert len(list(client.files.list())) == 2


def test_the_client_says_that_no_server_answers():
    with Client("http://127.0.0.1:9") as client:
        begun = time.monotonic()
        assert not client.is_ready()
        with pytest.raises(ServerGone, match="no server answers at http"):
            client.job("x")
        assert time.monotonic() - begun < 10


def test_a_job_id_with_any_character_is_looked_up_or_known_to_be_none(real):
    with Client(real) as client:
        for uuid in ("a b", "%2e", "ü", "a?b#c"):
            with pytest.raises(ApiError) as caught:
                client.job(uuid)
            assert caught.value.status == 404
        for uuid in ("a/b", ".."):  # no id has this form, and in a path it would name something else
            with pytest.raises(InvalidRequest) as refused:
                client.job(uuid)
            assert refused.value.code == "not_found"
