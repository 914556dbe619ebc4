"""llama-stack's routes over a real store: every address, data sets in all forms, what is refused and how."""

from __future__ import annotations

import base64
import json
from itertools import product
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from posttrain_service.app import create_app

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
INSTRUCT = {"chat_completion_input": json.dumps([{"role": "user", "content": "a"}]), "expected_answer": "b", "input_query": "a"}
DIALOG = {"dialog": json.dumps(GOOD["messages"])}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
PREFIXES = ("/v1", "/v1alpha")
DONE = {"status": "completed", "steps": 4}


@pytest.fixture
def http(bench, standing):
    app = create_app(bench.runtime.settings, build=lambda told: standing(bench.runtime))
    with TestClient(app, base_url="http://127.0.0.1:8484", raise_server_exceptions=False) as client:
        yield client


def register(http, name, *rows, prefix="/v1", **more):
    body = {"purpose": "post-training/messages", "source": {"type": "rows", "rows": list(rows)}, "dataset_id": name} | more
    return http.post(f"{prefix}/datasets", json=body)


def config(dataset="rows", **data):
    return {"n_epochs": 1, "max_steps_per_epoch": 0, "data_config": {"dataset_id": dataset, "batch_size": 2, "shuffle": True, "data_format": "dialog"} | data}


def sft(job_uuid="j", dataset="rows", **changes):
    return {"job_uuid": job_uuid, "training_config": config(dataset), "hyperparam_search_config": {}, "logger_config": {}, "model": "tiny"} | changes


def dpo(job_uuid="j", dataset="rows", **changes):
    body = sft(job_uuid, dataset) | {"finetuned_model": "tiny", "algorithm_config": {"beta": 0.1}} | changes
    return {key: value for key, value in body.items() if key != "model"}


@pytest.mark.parametrize(("prefix", "job_uuid"), [("/v1", "j"), ("/v1alpha", "team/run 1"), ("/v1alpha", "50%")])
def test_a_job_by_both_styles_of_address(bench, http, prefix, job_uuid):
    assert register(http, "rows", GOOD).status_code == 200
    root = f"{prefix}/post-training"
    made = http.post(f"{root}/supervised-fine-tune", json=sft(job_uuid))
    assert (made.status_code, made.json()) == (200, {"job_uuid": job_uuid, "status": "scheduled"})
    assert http.post(f"{root}/supervised-fine-tune", json=sft(job_uuid)).json() == made.json()
    taken = http.post(f"{root}/supervised-fine-tune", json=sft(job_uuid, hyperparam_search_config={}, model="tiny", training_config=config(batch_size=3)))
    assert (taken.status_code, taken.headers["x-should-retry"]) == (409, "false")
    assert http.get(f"{root}/jobs").json() == {"data": [{"job_uuid": job_uuid, "status": "scheduled"}]}
    name = quote(job_uuid, safe="")
    for what in ("status", "artifacts"):
        by_query = http.get(f"{root}/job/{what}", params={"job_uuid": job_uuid})
        by_path = http.get(f"{root}/jobs/{name}/{what}")
        assert by_query.status_code == by_path.status_code == 200
        assert by_query.json() == by_path.json()
        assert by_path.json()["job_uuid"] == job_uuid
    bench.rounds(2)
    assert http.get(f"{root}/jobs/{name}/status").json()["status"] == "in_progress"
    [native] = http.get("/post_training/jobs").json()["data"]
    assert (native["job_uuid"], native["status"]) == (name, "running")
    for how in ({"url": f"{root}/job/cancel", "json": {"job_uuid": job_uuid}}, {"url": f"{root}/job/cancel", "params": {"job_uuid": job_uuid}}, {"url": f"{root}/jobs/{name}/cancel"}):
        answer = http.post(**how)
        assert (answer.status_code, answer.json()) == (200, None)
    [job] = bench.runtime.store.jobs.live()
    bench.ends(job, result={"status": "stopped", "steps": 0})
    bench.rounds()
    assert http.get(f"{root}/job/status", params={"job_uuid": job_uuid}).json()["status"] == "cancelled"


def test_unknown_jobs_and_missing_ids(http):
    for prefix, (method, path) in product(PREFIXES, [("get", "status"), ("get", "artifacts"), ("post", "cancel")]):
        for url in (f"jobs/none/{path}", f"job/{path}?job_uuid=none"):
            answer = getattr(http, method)(f"{prefix}/post-training/{url}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found"), url
        answer = getattr(http, method)(f"{prefix}/post-training/job/{path}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "job_uuid"), path
        assert "job_uuid" in answer.json()["detail"]
        twice = http.post(f"{prefix}/post-training/job/cancel?job_uuid=a", json={"job_uuid": "b"})
        assert twice.status_code == 400


def test_an_ended_job_cannot_be_cancelled(bench, http):
    register(http, "rows", GOOD)
    http.post("/v1/post-training/supervised-fine-tune", json=sft())
    bench.rounds(2)
    bench.ends(bench.jobs.get("j").job, result=DONE)
    bench.rounds()
    answer = http.post("/v1/post-training/jobs/j/cancel")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")


WRONG = (
    (sft(dataset="nowhere"), "training_config.data_config.dataset_id", "no such file or data set"),
    (sft(dataset="bad"), "training_config.data_config.dataset_id", "line 2"),
    (sft(dataset="pairs"), "training_config.data_config.dataset_id", "must be a conversation"),
    (sft(model="nothing-here"), "model", "nothing-here"),
    (dpo(dataset="pairs", finetuned_model="nothing-here"), "finetuned_model", "nothing-here"),
    (sft(training_config=config("instruct")), "training_config.data_config.dataset_id", "llama_stack_instruct"),
    (sft(training_config=config("dialog", data_format="instruct")), "training_config.data_config.dataset_id", "llama_stack_dialog"),
    (sft(training_config=config() | {"dtype": "fp16"}), "training_config.dtype", "fp16"),
    (sft(training_config=config() | {"efficiency_config": {"fsdp_cpu_offload": True}}), "training_config.efficiency_config.fsdp_cpu_offload", "fsdp_cpu_offload moves"),
    (sft(training_config=config() | {"efficiency_config": {"enable_activation_offloading": True}}), "training_config.efficiency_config.enable_activation_offloading", "enable_activation_offloading moves"),
    (sft(training_config={}), "training_config.n_epochs", "n_epochs"),
    (sft(algorithm_config={"rank": 8}), "algorithm_config", "type"),
)  # fmt: skip


def test_what_is_wrong_is_400_and_stores_nothing(http):
    register(http, "rows", GOOD)
    register(http, "bad", GOOD, {"messages": []})
    register(http, "pairs", PAIR)
    register(http, "instruct", INSTRUCT)
    register(http, "dialog", DIALOG)
    for body, param, word in WRONG:
        route = "preference-optimize" if "finetuned_model" in body else "supervised-fine-tune"
        answer = http.post(f"/v1/post-training/{route}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert word in error["message"]
        assert answer.json()["detail"] == error["message"]
    assert http.get("/v1/post-training/jobs").json() == {"data": []}


def test_bad_bodies_are_400(http):
    url = "/v1alpha/post-training/supervised-fine-tune"
    for body, kind in ((b"{", "application/json"), (b"[]", "application/json"), (b'{"job_uuid": "a", "job_uuid": "b"}', "application/json")):
        assert http.post(url, content=body, headers={"content-type": kind}).status_code == 400
    assert http.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert http.get("/v1/post-training/jobs?limit=3").status_code == 400


def test_rows_are_taken_as_the_format_says_and_warnings_are_told(bench, http):
    register(http, "instruct", INSTRUCT)
    register(http, "dialog", DIALOG)
    register(http, "pairs", PAIR)
    for number, (data_format, name, learned) in enumerate([("instruct", "instruct", "last_assistant"), ("dialog", "dialog", "assistant")]):
        body = sft(f"j{number}", training_config=config(name, data_format=data_format) | {"max_steps_per_epoch": 1}, surprise=1)
        assert http.post("/v1/post-training/supervised-fine-tune", json=body).status_code == 200
        status = http.get(f"/v1/post-training/jobs/j{number}/status").json()
        assert bench.jobs.get(f"j{number}").job.spec["training"]["train_on"] == learned
        assert "surprise is not known" in status["warnings"][0]
        assert "send 0" in status["warnings"][1]
        assert [event.message for event in bench.jobs.events(f"j{number}").data if event.type == "warning"] == status["warnings"]
    made = http.post("/v1/post-training/preference-optimize", json=dpo("d", "pairs", algorithm_config={"beta": 0.3, "loss_type": "ipo"}))
    assert made.status_code == 200, made.text
    method = bench.jobs.get("d").job.spec["method"]
    assert (method["kind"], method["beta"], method["loss_type"]) == ("dpo", 0.3, "ipo")


# ---- data sets ----


def test_data_sets_are_registered_listed_read_and_unregistered(bench, http):
    rows = [{"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "é"}]} for n in range(5)]
    for prefix, name in (("/v1", "a"), ("/v1beta", "team/b c")):
        made = register(http, name, *rows, prefix=prefix, metadata={"k": [1]})
        assert made.status_code == 200, made.text
        assert (made.json()["identifier"], made.json()["metadata"]) == (name, {"k": [1]})
        assert http.get(f"{prefix}/datasets/{name}").json() == made.json()
        assert register(http, name, *rows, prefix=prefix, metadata={"k": [1]}).json() == made.json()
        other = register(http, name, *rows[:2], prefix=prefix)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "dataset_exists")
        assert http.get(f"{prefix}/datasetio/iterrows/{name}").json() == {"data": rows, "has_more": False, "url": None}
        assert http.get(f"{prefix}/datasetio/iterrows/{name}?start_index=1&limit=2").json() == {"data": rows[1:3], "has_more": True, "url": None}
        assert http.get(f"{prefix}/datasetio/iterrows/{name}?limit=-1").json()["data"] == rows
        assert http.get(f"{prefix}/datasetio/iterrows/{name}?limit=0").json() == {"data": [], "has_more": True, "url": None}
    assert [one["identifier"] for one in http.get("/v1/datasets").json()["data"]] == ["a", "team/b c"]
    file = http.get("/v1/datasets/a").json()["provider_resource_id"]
    held = http.delete(f"/v1/files/{file}")
    assert (held.status_code, held.json()["error"]["code"]) == (409, "file_in_use")
    assert "data set 'a'" in held.json()["error"]["message"]
    assert (http.delete("/v1/datasets/a").status_code, http.delete("/v1/datasets/a").status_code) == (200, 404)
    assert http.get("/v1/datasetio/iterrows/a").json()["error"]["code"] == "dataset_not_found"
    assert http.get(f"/v1/files/{file}").status_code == 404
    bench.runtime.sweeper.sweep()
    assert not (bench.runtime.settings.files_dir / file).exists()
    assert [one["identifier"] for one in http.get("/v1beta/datasets").json()["data"]] == ["team/b c"]


def test_a_job_keeps_its_rows_when_the_data_set_goes(bench, http):
    register(http, "rows", GOOD)
    assert http.post("/v1/post-training/supervised-fine-tune", json=sft()).status_code == 200
    [file] = bench.jobs.get("j").job.file_ids
    assert http.delete("/v1/datasets/rows").status_code == 200
    bench.runtime.sweeper.sweep()
    assert (bench.runtime.settings.files_dir / file).exists()
    assert http.post("/v1/post-training/supervised-fine-tune", json=sft()).json()["job_uuid"] == "j"


CSV = b'prompt,completion\na,"b, c"\n'
ADDRESSES = [
    ("data:text/csv;base64," + base64.b64encode(CSV).decode(), [{"prompt": "a", "completion": "b, c"}]),
    ("data:application/jsonl,%7B%22prompt%22:%22a%22,%22completion%22:%22b%22%7D", [{"prompt": "a", "completion": "b"}]),
    ("data:application/json;charset=utf-8;base64," + base64.b64encode(b'[{"a": 1}, {"a": 2}]').decode(), [{"a": 1}, {"a": 2}]),
    ("file:inside.csv", [{"prompt": "a", "completion": "b, c"}]),
    ("file:sub/rows.jsonl", [{"a": 1}]),
]


@pytest.fixture
def folder(bench):
    folder = bench.runtime.settings.storage_dir / "datasets"
    (folder / "sub").mkdir(parents=True)
    (folder / "inside.csv").write_bytes(CSV)
    (folder / "sub/rows.jsonl").write_text('{"a": 1}\n')
    (folder / "outside").symlink_to(bench.runtime.settings.storage_dir / "posttrain.db")
    return folder


def test_rows_at_an_address(http, folder):
    absolute = [(f"file://{folder}/{uri[5:]}", rows) for uri, rows in ADDRESSES if uri.startswith("file:")]
    for name, (address, rows) in enumerate([*ADDRESSES, *absolute]):
        made = register(http, str(name), source={"type": "uri", "uri": address})
        assert made.status_code == 200, made.text
        assert made.json()["source"] == {"type": "uri", "uri": address}
        assert http.get(f"/v1/datasetio/iterrows/{name}").json()["data"] == rows


UNUSABLE = (
    *[({"type": "uri", "uri": uri}, "source.uri") for uri in (
        "https://example.org/a.jsonl", "huggingface://datasets/a/b", "lsfs://a", "file:../posttrain.db", "file:outside", "file:///etc/passwd",
        "file:sub", "file:none.jsonl", "file://host/a", "file:", "rows.jsonl", "data:image/png;base64,AAAA", "data:text/csv;base64,%%%", "data:text/csv",
    )],
    ({"type": "uri", "uri": "data:application/jsonl,%7B"}, "source"),
    ({"type": "uri", "uri": "data:application/jsonl,"}, "source"),
    ({"type": "uri", "uri": "data:application/jsonl,%5B1%5D"}, "source"),
    ({"type": "rows", "rows": []}, "source.rows"),
    ({"type": "rows", "rows": [1]}, "source.rows.0"),
    ({"type": "table"}, "source"),
)  # fmt: skip


def test_sources_that_cannot_be_used(bench, http, folder):
    for source, param in UNUSABLE:
        answer = register(http, "x", source=source)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (source, answer.text)
    assert http.get("/v1/datasets").json() == {"data": []}
    assert http.get("/v1/files").json()["data"] == []
    assert list(bench.runtime.settings.files_dir.iterdir()) == []


def test_names_that_cannot_be_used_and_names_made(http):
    for name in ("a\nb", "x" * 201, "file-" + "0" * 32):
        assert register(http, name, GOOD).status_code == 400
    assert register(http, None, GOOD).json()["identifier"].startswith("dataset-")


def test_a_data_set_is_good_for_every_api(bench, http):
    register(http, "rows", GOOD)
    made = http.post("/post_training/jobs", json={"model": "tiny", "dataset": "rows"})
    assert made.status_code == 201, made.text
    assert made.json()["spec"]["dataset"]["filename"] == "rows.jsonl"
