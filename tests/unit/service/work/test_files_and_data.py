"""Uploads, data sets before any job, dry runs, health."""

import io
import json
import threading

import pytest

from posttrain_service.errors import InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.work import datasets, dryrun, health

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def upload(bench, text="x", **options):
    options = {"filename": "a.jsonl", "purpose": "fine-tune"} | options
    return bench.runtime.services.files.create(io.BytesIO(text.encode()), **options)


def test_a_file_is_stored_listed_read_and_deleted(bench):
    files = bench.runtime.services.files
    first = upload(bench, "one", filename="../../a\x00b.jsonl")
    bench.clock.advance(1)
    second = upload(bench, "two!")
    assert (first.filename, first.size_bytes) == ("ab.jsonl", 3)
    page = files.page(limit=1)
    assert ([file.id for file in page.data], page.has_more, page.last_id) == ([second.id], True, second.id)
    assert [file.id for file in files.page(after=second.id).data] == [first.id]
    path, _ = files.content(first.id)
    assert path.read_bytes() == b"one"
    files.delete(first.id)
    assert not path.exists()
    for call in (files.get, files.content, files.delete):
        with pytest.raises(NotFound):
            call(first.id)


@pytest.mark.parametrize("file_id", ["../../etc/passwd", "file-1", "", "file-" + "0" * 32])
def test_unknown_file_ids(bench, file_id):
    with pytest.raises(NotFound):
        bench.runtime.services.files.get(file_id)


def test_a_refused_upload_leaves_no_bytes(make_bench):
    bench = make_bench(max_upload_bytes=3)
    with pytest.raises(PayloadTooLarge):
        upload(bench, "four")
    with pytest.raises(InvalidRequest):
        upload(bench, "one", purpose="vision")
    with pytest.raises(InvalidRequest):
        upload(bench, "one", expires_after_s=5)
    assert list(bench.runtime.settings.files_dir.iterdir()) == []


def test_the_same_upload_key_is_one_file(bench):
    first = upload(bench, "one", idempotency_key="k")
    assert upload(bench, "one", idempotency_key="k").id == first.id
    with pytest.raises(InvalidRequest):
        upload(bench, "other", idempotency_key="k")
    assert [path.name for path in bench.runtime.settings.files_dir.iterdir()] == [first.id]


def test_validation_reports_each_line(bench):
    file = upload(bench, json.dumps(GOOD) + "\n\n{\n")
    report = bench.runtime.services.datasets.validate(file.id)
    assert (report["valid"], report["rows"], report["format"], report["num_errors"]) == (False, 2, "messages", 1)
    assert report["errors"][0]["line"] == 3
    assert "tokens" not in report
    assert bench.runtime.services.datasets.validate({"rows": [GOOD]})["valid"]


def test_validation_asks_what_is_trained_on(bench):
    asked = {"rows": [{"messages": GOOD["messages"][:1]}]}
    report = bench.runtime.services.datasets.validate(asked)
    assert (report["valid"], report["errors"][0]["line"]) == (False, 1)
    assert "no turn of the assistant" in report["errors"][0]["message"]
    assert bench.runtime.services.datasets.validate(asked, train_on="all")["valid"]


@pytest.mark.parametrize(
    ("dataset", "options", "param"),
    [
        ("file-" + "0" * 32, {}, "dataset"),
        ({"rows": []}, {}, "dataset.rows"),
        ({"rows": [GOOD], "x": 1}, {}, "dataset.x"),
        ({"rows": [GOOD]}, {"method": {"kind": "magic"}}, "method"),
        ({"rows": [GOOD]}, {"model": "nope"}, "model"),
    ],
)
def test_validation_of_what_cannot_be_looked_at(bench, dataset, options, param):
    with pytest.raises(InvalidRequest) as caught:
        bench.runtime.services.datasets.validate(dataset, **options)
    assert caught.value.param == param


def test_tokens_are_counted_by_the_named_model(bench, monkeypatch):
    asked = []

    def tool(python, command, payload, timeout_s):
        with open(payload["data_path"]) as file:  # noqa: PTH123
            asked.append((command, payload["model_path"], file.read()))
        return {"rows": 1, "tokens": 7, "max_len": 7}

    monkeypatch.setattr(datasets, "run_tool", tool)
    report = bench.runtime.services.datasets.validate({"rows": [GOOD]}, model="tiny")
    assert report["tokens"] == {"tokens": 7, "max_len": 7}
    assert asked == [("inspect", str(bench.runtime.settings.base_models_dir / "tiny"), json.dumps(GOOD) + "\n")]
    assert not [path for path in bench.runtime.settings.storage_dir.iterdir() if path.name.startswith(".check")]


BODY = {"model": "tiny", "dataset": {"rows": [GOOD]}, "validation_dataset": {"rows": [GOOD]},
        "training": {"max_validation_steps": 1, "keep_best": 1}}  # fmt: skip


def test_a_dry_run_says_everything_and_stores_nothing(bench, monkeypatch):
    asked = []

    def tool(python, command, payload, timeout_s):
        asked.append((command, payload["nproc"], payload["train_args"]["validation_data_path"]))
        return {"memory": {"per_rank_bytes": 1, "total_bytes": 1, "fits": True}, "steps": 3, "tokens": 9}

    monkeypatch.setattr(dryrun, "run_tool", tool)
    plan = bench.jobs.plan(JobRequest.model_validate(BODY))
    assert asked == [("estimate", 1, None)]
    assert (plan["steps"], plan["tokens"], plan["memory"]["fits"], plan["devices"]) == (3, 9, True, ["cpu:0"])
    assert plan["spec"]["training"]["learning_rate"] == 2e-5
    assert (plan["env"], plan["argv"]) == (["A"], ["torchrun"])
    assert list(bench.runtime.settings.jobs_dir.iterdir()) == []
    assert bench.jobs.page().data == []
    assert not [path for path in bench.runtime.settings.storage_dir.iterdir() if path.name.startswith(".check")]


def test_a_dry_run_without_a_working_trainer_says_so(bench, monkeypatch):
    def tool(*args):
        raise Unavailable("no torch here")

    monkeypatch.setattr(dryrun, "run_tool", tool)
    plan = bench.jobs.plan(JobRequest.model_validate(BODY))
    assert plan["memory"] is None
    assert any("no torch here" in warning for warning in plan["warnings"])


def test_a_dry_run_refuses_what_a_submission_would(bench):
    with pytest.raises(InvalidRequest):
        bench.jobs.plan(JobRequest.model_validate(BODY | {"model": "nope"}))


def test_ready_says_what_is_missing(make_bench):
    bench = make_bench(disk_reserve_bytes=2**59)
    is_ready, facts = bench.runtime.services.health.ready()
    assert not is_ready
    assert "must stay free" in facts["checks"]["disk"]
    assert "supervisor" in facts["checks"]["loops"]
    assert facts["checks"]["store"] == "ok"


def test_ready_with_living_loops(bench):
    before = set(threading.enumerate())  # a server of other tests may still run
    bench.runtime.start()
    assert bench.runtime.services.health.ready() == (True, {"status": "ok", "checks": dict.fromkeys(("store", "loops", "disk"), "ok")})
    bench.runtime.stop()
    assert not any(thread.name.startswith("posttrain-") for thread in set(threading.enumerate()) - before)


def test_the_trainers_version_is_asked_for_once_it_can_answer(bench, monkeypatch):
    answers = [Unavailable("not yet"), {"torch": "2"}]

    def tool(*args):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(health, "run_tool", tool)
    version = bench.runtime.services.health.version
    assert [version()["trainer"] for _ in range(3)] == [{"error": "not yet"}, {"torch": "2"}, {"torch": "2"}]
