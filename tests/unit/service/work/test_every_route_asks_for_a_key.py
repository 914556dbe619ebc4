"""Every route of the application, walked without a key, with weak ones, and with a stranger's."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from posttrain_service.app import create_app
from posttrain_service.domain.keys import make_key
from posttrain_service.wire.shapes import Error
from posttrain_trainer.contract.rundir import write_json

OPEN = None
SCOPES = {
    ("jobs", "get"): "read",
    ("jobs", "post"): "submit",
    ("jobs", "delete"): "submit",
    ("checkpoints", "get"): "read",
    ("checkpoints", "delete"): "submit",
    ("datasets", "get"): "read",
    ("datasets", "post"): "submit",
    ("datasets", "delete"): "submit",
    ("files", "get"): "read",
    ("files", "post"): "submit",
    ("files", "delete"): "submit",
    ("uploads", "post"): "submit",
    ("fine_tuning", "get"): "read",
    ("fine_tuning", "post"): "submit",
    ("models", "get"): "read",
    ("models", "delete"): "submit",
    ("llama_stack", "get"): "read",
    ("llama_stack", "post"): "submit",
    ("llama_stack_datasets", "get"): "read",
    ("llama_stack_datasets", "post"): "submit",
    ("llama_stack_datasets", "delete"): "submit",
    ("/health/live", "get"): OPEN,
    ("/health/ready", "get"): OPEN,
    ("/version", "get"): OPEN,
    ("/metrics", "get"): "read",
}
"""By the first tag and the method, for the tag "service" by path: a route that is not in here has yet to be decided upon."""
ROW = b'{"prompt": "a", "completion": "b"}\n'
LOG = "words of ann"


@dataclass
class World:
    """A server with keys, and everything that one of its owners has."""

    http: TestClient
    keys: dict[str, str]
    own: dict[str, str]
    """Name of a path's or query's parameter -> what ann has."""

    def ask(self, method: str, url: str, who: str | None, **how: Any) -> Any:
        headers = how.pop("headers", {}) | ({} if who is None else {"authorization": f"Bearer {self.keys.get(who, who)}"})
        return self.http.request(method, url, headers=headers, **how)


@pytest.fixture
def world(bench, standing):
    store = bench.runtime.store
    keys = {}
    for name, owner, scope in (("reader", "ann", "read"), ("ann", "ann", "submit"), ("bob", "bob", "submit"), ("root", "eve", "admin")):
        key, keys[name] = make_key(owner, scope, 0.0)
        store.keys.insert(key)
    app = create_app(bench.runtime.settings, build=lambda told: standing(bench.runtime))
    with TestClient(app, base_url="http://127.0.0.1:8484", raise_server_exceptions=False) as http:
        world = World(http, keys, {})
        file = world.ask("POST", "/v1/files", "ann", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", ROW)}).json()
        upload = world.ask("POST", "/v1/uploads", "ann", json=UPLOAD).json()
        made = world.ask("POST", "/post_training/jobs", "ann", json={"model": "tiny", "dataset": file["id"], "job_uuid": "anns-job"})
        assert made.status_code == 201, made.text
        finish(bench, "anns-job")
        model = world.ask("GET", "/post_training/jobs/anns-job", "ann").json()["fine_tuned_model"]
        assert world.ask("POST", "/v1/datasets", "ann", json=dataset("anns-rows")).status_code == 200
        assert world.ask("POST", "/v1/datasets", "ann", json=dataset("anns-pairs", PAIR)).status_code == 200
        world.own |= {
            "job_uuid": "anns-job", "job_id": "anns-job", "checkpoint_id": "step-000001", "path": "model/weights",
            "file_id": file["id"], "upload_id": upload["id"], "model": model,
            "dataset_id": "anns-rows", "pairs_id": "anns-pairs",
        }  # fmt: skip
        yield world


UPLOAD = {"bytes": len(ROW), "filename": "b.jsonl", "purpose": "fine-tune", "mime_type": "application/jsonl"}


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def dataset(name, row=None):
    return {"purpose": "post-training/messages", "source": {"type": "rows", "rows": [row or {"prompt": "a", "completion": "b"}]}, "dataset_id": name}


def llama(job_uuid, dataset_id, **more):
    data = {"dataset_id": dataset_id, "batch_size": 1, "shuffle": True, "data_format": "dialog"}
    return {"job_uuid": job_uuid, "training_config": {"n_epochs": 1, "data_config": data}, "hyperparam_search_config": {}, "logger_config": {}} | more


def finish(bench, job_uuid):
    bench.rounds(2)
    job = bench.jobs.get(job_uuid).job
    run = bench.run_dir(job)
    run.attempt(1).rank_log(0).parent.mkdir(parents=True, exist_ok=True)
    run.attempt(1).rank_log(0).write_text(f"{LOG}\n")
    for step in (1, 2):
        folder = run.checkpoint(f"step-00000{step}")
        (folder / "model").mkdir(parents=True)
        (folder / "model/weights").write_bytes(b"w")
        (folder / "model/config.json").write_text("{}")
        files = [{"path": f"model/{n}", "size_bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in (("weights", b"w"), ("config.json", b"{}"))]
        write_json(folder / "manifest.json", {
            "v": 1, "id": folder.name, "step": step, "epoch": 1.0, "samples_seen": 4, "tokens_seen": 40, "attempt": 1, "created_at": time.time(),
            "kind": "full", "trigger": "end", "metrics": {"loss": 0.25}, "arguments_digest": "x", "files": files})  # fmt: skip
    bench.ends(job, result={"status": "completed", "steps": 2})
    bench.rounds()
    assert bench.jobs.get(job_uuid).job.state == "succeeded"


def bodies(own):
    """What the routes that need a body are sent, with the ids of `own`."""
    tune = {"json": llama("new", own["dataset_id"], model="tiny")}
    prefer = {"json": llama("newer", own["pairs_id"], finetuned_model="tiny", algorithm_config={"beta": 0.1})}
    register = {"json": dataset("other-rows")}
    cancel = {"json": {"job_uuid": own["job_uuid"]}}
    return {
        **{f"llama_{name}{ending}": body for ending in ("", "_alpha", "_beta") for name, body in (
            ("supervised_fine_tune", tune), ("preference_optimize", prefer), ("register_dataset", register), ("cancel_job", cancel))},
        "create_job": {"json": {"model": "tiny", "dataset": own["file_id"]}},
        "create_fine_tuning_job": {"json": {"model": "tiny", "training_file": own["file_id"]}},
        "validate_dataset": {"json": {"dataset": own["file_id"]}},
        "create_file": {"data": {"purpose": "fine-tune"}, "files": {"file": ("c.jsonl", ROW)}},
        "create_upload": {"json": UPLOAD},
        "add_upload_part": {"files": {"data": ("part", ROW)}},
        "complete_upload": {"json": {"part_ids": ["part_" + "0" * 32]}},
    }


def operations(http):
    """(operation, method, path, scope): looking first, removing last, what contains others after them."""
    found = []
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            tag = operation["tags"][0]
            decided = (path if tag == "service" else tag, method)
            assert decided in SCOPES, f"{method} {path}: decide in SCOPES which key it needs"
            assert (operation.get("security") == []) == (SCOPES[decided] is OPEN), f"{method} {path}: the description says otherwise"
            found.append((operation, method, path, SCOPES[decided]))
    order = {"get": 0, "post": 1, "delete": 2}
    return sorted(found, key=lambda o: (order[o[1]], "{checkpoint_id}" not in o[2], "{model}" not in o[2]))


def address(operation, path, ids):
    names = re.findall(r"\{(\w+)\}", path)
    assert set(names) <= set(ids), f"{path}: say what stands for {names}"
    needed = [p["name"] for p in operation.get("parameters", []) if p["in"] == "query" and p.get("required")]
    url = re.sub(r"\{(\w+)\}", lambda m: quote(ids[m[1]], safe="/" if m[1] == "path" else ""), path)
    return url + ("?" + "&".join(f"{n}={quote(ids[n])}" for n in needed) if needed else "")


def test_without_a_key_or_with_a_bad_one_only_health_answers(world):
    _, text = make_key("ann", "admin", 0.0)
    for operation, method, path, scope in operations(world.http):
        url, how = address(operation, path, world.own), bodies(world.own).get(operation["operationId"], {})
        wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
        for sent in (None, text, wrong, "any", world.keys["ann"][:-1], world.keys["ann"] + "x"):
            answer = world.ask(method, url, sent, **how)
            if scope is OPEN:
                assert answer.status_code in (200, 503), (method, url)
                continue
            assert answer.status_code == 401, (method, url, sent)
            Error.model_validate(answer.json())
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["error"]["type"] == "authentication_error"
            assert sent in (None, "any") or sent not in answer.text
    assert world.ask("GET", "/nothing", None).status_code == 401
    assert len(world.ask("GET", "/post_training/jobs", "ann").json()["data"]) == 1


def test_a_read_key_only_looks(world):
    for operation, method, path, scope in operations(world.http):
        url, how = address(operation, path, world.own), bodies(world.own).get(operation["operationId"], {})
        answer = world.ask(method, url, "reader", **how)
        if scope == "submit":
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "scope_insufficient"), (method, url)
            assert answer.json()["error"]["type"] == "permission_error"
        else:
            assert answer.status_code in (200, 503 if scope is OPEN else 200), (method, url, answer.text)
    assert world.ask("GET", "/post_training/jobs/anns-job/checkpoints/step-000002", "reader").status_code == 200


def test_what_a_stranger_asks_for_is_not_there(world):
    """Another owner's answers are those for ids that nobody has; and the owner's aren't, or this would prove nothing."""
    none = {name: value for name, value in world.own.items() if name in ("checkpoint_id", "path")} | {
        "job_uuid": "nobodys1", "job_id": "nobodys1", "file_id": "file-" + "0" * 32, "upload_id": "upload_" + "0" * 32,
        "model": world.own["model"].replace("anns-job", "nobodys1"), "dataset_id": "nobo-rows", "pairs_id": "nobo-pairs",
    }  # fmt: skip
    assert len(none["job_uuid"]) == len(world.own["job_uuid"])
    for operation, method, path, scope in operations(world.http):
        name = operation["operationId"]
        theirs = world.ask(method, address(operation, path, world.own), "bob", **bodies(world.own).get(name, {}))
        nobodys = world.ask(method, address(operation, path, none), "bob", **bodies(none).get(name, {}))
        asked = address(operation, path, world.own) + str(bodies(world.own).get(name, ""))
        if any(asked != asked.replace(world.own[key], none[key]) for key in ("job_uuid", "file_id", "upload_id", "model", "dataset_id", "pairs_id")):
            assert theirs.status_code == nobodys.status_code, (method, path, theirs.text)
            assert theirs.status_code in (404, 400 if "llama_stack" in operation["tags"] else 422), (method, path, theirs.text)
            text = re.sub("req-[0-9a-f]{32}", "req", theirs.text)
            for key, value in world.own.items():
                text = text.replace(value, none[key])
            assert text == re.sub("req-[0-9a-f]{32}", "req", nobodys.text), (method, path)
        elif method == "get" and scope is not OPEN:
            assert theirs.status_code == 200, (method, path, theirs.text)
            for value in ("anns-job", world.own["file_id"], LOG):
                assert value not in theirs.text, (method, path)
    for kind in ("events", "logs", "metrics"):
        answer = world.ask("GET", f"/post_training/jobs/anns-job/{kind}", "bob", headers={"accept": "text/event-stream"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    for cursor in ("/post_training/jobs?after=anns-job", f"/v1/files?after={world.own['file_id']}"):
        assert world.ask("GET", cursor, "bob").json()["error"]["code"] == "invalid_cursor"
    assert world.ask("GET", "/post_training/jobs?owner=ann", "bob").json()["data"] == []
    further = {"model": world.own["model"], "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}}
    for url, body in (
        ("/post_training/jobs", further),
        ("/post_training/jobs?dry_run=true", further),
        ("/v1/fine_tuning/jobs", {"model": world.own["model"], "training_file": world.own["file_id"]}),
    ):
        refused = world.ask("POST", url, "bob", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "model_not_found"), url
    taken = world.ask("POST", "/post_training/jobs", "bob", json={**further, "model": "tiny", "job_uuid": "anns-job"})
    assert taken.status_code == 409
    assert world.ask("POST", "/v1/datasets", "bob", json=dataset("anns-rows")).json()["error"]["code"] == "dataset_exists"


@pytest.mark.parametrize("who", ["ann", "root"])
def test_the_owner_and_an_admin_reach_everything(world, who):
    late = {"cancel", "pause", "resume", "retry"}
    for operation, method, path, _ in operations(world.http):
        name = operation["operationId"]
        answer = world.ask(method, address(operation, path, world.own), who, **bodies(world.own).get(name, {}))
        good = {200, 201, 204} | ({409} if path.rsplit("/", 1)[-1] in late else set())
        good |= {422} if name == "complete_upload" else {503} if path == "/health/ready" else set()
        good |= {404} if name == "llama_unregister_dataset_beta" else set()  # it went by its other address
        if name == "delete_file":  # the jobs that were just made read it
            good |= {409}
        assert answer.status_code in good, (method, path, answer.status_code, answer.text)
