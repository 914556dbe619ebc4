"""From a request to a stored job, and nothing stored for a refused one."""

import io
import json
import shutil
import threading
from types import SimpleNamespace

import pytest

from posttrain_service.errors import Conflict, DiskFull, InvalidRequest, PayloadTooLarge, StoreBusy
from posttrain_service.wire.jobs import JobRequest
from posttrain_trainer.contract.rundir import RunDir, read_json

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def create(bench):
    def act(key=None, **changes):
        body = {"model": "tiny", "dataset": {"rows": [GOOD]}} | changes
        return bench.jobs.create(JobRequest.model_validate(body), idempotency_key=key)

    return act


def upload(bench, text, filename="rows.jsonl"):
    return bench.runtime.services.files.create(io.BytesIO(text.encode()), filename=filename, purpose="fine-tune").id


def nothing_is_left(bench):
    return list(bench.runtime.settings.jobs_dir.iterdir()) == [] and bench.jobs.page().data == []


def test_a_job_is_stored_with_its_rows_and_spec(bench, create):
    view, new = create(name="first", metadata={"a": "b"}, retention={"keep": True}, resources={"max_duration_s": 60})
    job = view.job
    run_dir = RunDir(bench.runtime.settings.jobs_dir / job.run_id)
    assert (new, job.state, job.job_uuid, view.queue_position) == (True, "queued", job.run_id, 1)
    assert (job.name, job.metadata, job.keep, job.max_duration_s) == ("first", {"a": "b"}, True, 60)
    assert json.loads((run_dir.data / "train.jsonl").read_text()) == GOOD
    spec = read_json(run_dir.spec)
    assert spec == {"run_id": job.run_id, "job_uuid": job.job_uuid, **json.loads(json.dumps(job.spec))}
    assert str(bench.runtime.settings.storage_dir) not in json.dumps(job.spec)
    assert job.deadline_at == job.created_at + bench.runtime.settings.queue_ttl_s


def test_an_uploaded_file_stays_with_its_job(bench, create):
    file_id = upload(bench, json.dumps(GOOD) + "\n")
    job = create(dataset=file_id, validation_dataset=file_id)[0].job
    assert job.file_ids == [file_id, file_id]
    with pytest.raises(Conflict, match=job.job_uuid):
        bench.runtime.services.files.delete(file_id)
    bench.jobs.cancel(job.job_uuid)
    bench.runtime.services.files.delete(file_id)
    data = RunDir(bench.runtime.settings.jobs_dir / job.run_id).data
    assert sorted(path.name for path in data.iterdir()) == ["train.jsonl", "validation.jsonl"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": "nope"}, "model"),
        ({"dataset": "file-" + "0" * 32}, "dataset"),
        ({"dataset": "../../etc/passwd"}, "dataset"),
        ({"validation_dataset": "file-x"}, "validation_dataset"),
        ({"dataset": {"rows": [GOOD, {"messages": []}]}}, "dataset"),
        ({"validation_dataset": {"rows": [{}]}}, "validation_dataset"),
        ({"resources": {"devices": 9}}, "resources.devices"),
        ({"training": {"max_seq_len": 999}}, "training.max_seq_len"),
    ],
)
def test_a_refused_request_leaves_nothing(bench, create, changes, param):
    with pytest.raises(InvalidRequest) as caught:
        create(**changes)
    assert caught.value.param == param
    assert nothing_is_left(bench)


def test_bad_rows_are_listed_by_line_before_anything_is_stored(bench, create):
    file_id = upload(bench, "".join(json.dumps(row) + "\n" for row in (GOOD, {"messages": []}, 3)))
    with pytest.raises(InvalidRequest) as caught:
        create(dataset=file_id)
    assert [error["line"] for error in caught.value.errors] == [2, 3]
    assert nothing_is_left(bench)
    job = create(dataset=file_id, training={"invalid_rows": "skip"})[0].job
    assert any("2 of 3 rows are bad" in warning for warning in job.warnings)


def test_too_many_inline_rows(make_bench):
    bench = make_bench(max_rows_inline=1)
    with pytest.raises(PayloadTooLarge):
        bench.submit(dataset={"rows": [GOOD, GOOD]})


def test_a_full_disk_refuses_the_request(make_bench):
    bench = make_bench(disk_reserve_bytes=2**59)
    with pytest.raises(DiskFull, match="DISK_RESERVE"):
        bench.submit()
    assert nothing_is_left(bench)


def test_the_same_id_and_body_is_the_same_job(bench, create):
    first, new = create(job_uuid="mine")
    again, new_again = create(job_uuid="mine")
    assert (new, new_again) == (True, False)
    assert again.job == first.job
    assert first.job.run_id != "mine"
    with pytest.raises(Conflict) as caught:
        create(job_uuid="mine", name="other")
    assert caught.value.code == "job_exists"
    assert len(list(bench.runtime.settings.jobs_dir.iterdir())) == 1


def test_a_repeat_is_not_refused_for_what_has_changed_since(bench, create):
    create(key="k", job_uuid="mine")
    (bench.runtime.settings.base_models_dir / "tiny" / "config.json").unlink()
    assert create(key="k", job_uuid="mine")[1] is False
    assert create(job_uuid="mine")[1] is False


def test_an_idempotency_key_makes_one_job_also_after_a_restart(make_bench):
    first = make_bench()
    body = {"model": "tiny", "dataset": {"rows": [GOOD]}}
    one, new = first.jobs.create(JobRequest.model_validate(body), idempotency_key="k")
    first.runtime.stop()
    second = make_bench()
    two, new_again = second.jobs.create(JobRequest.model_validate(body), idempotency_key="k")
    assert (new, new_again, one.job.job_uuid) == (True, False, two.job.job_uuid)
    with pytest.raises(InvalidRequest) as caught:
        second.jobs.create(JobRequest.model_validate(body | {"name": "x"}), idempotency_key="k")
    assert caught.value.code == "idempotency_key_reused"


def test_the_same_key_at_the_same_time_makes_one_job(bench, create):
    gate = threading.Barrier(6)
    made = []

    def act():
        gate.wait()
        made.append(create(key="k"))

    threads = [threading.Thread(target=act) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [new for _, new in made].count(True) == 1
    assert len({view.job.run_id for view, _ in made}) == 1
    assert len(list(bench.runtime.settings.jobs_dir.iterdir())) == 1


@pytest.mark.parametrize("key", ["", "a" * 256, "a\nb"])
def test_a_key_that_cannot_be_kept_is_refused(bench, create, key):
    with pytest.raises(InvalidRequest):
        create(key=key)


def test_a_store_that_fails_leaves_no_folder(bench, create, monkeypatch):
    def fail(*args, **kwargs):
        raise StoreBusy("locked")

    monkeypatch.setattr(bench.runtime.store.jobs, "insert", fail)
    with pytest.raises(StoreBusy):
        create()
    assert nothing_is_left(bench)


def test_checkpoints_that_may_not_fit_are_a_warning(bench, create, monkeypatch):
    (bench.runtime.settings.base_models_dir / "tiny" / "model.safetensors").write_bytes(b"x" * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**7))
    assert any("checkpoints may need about 12,000,000 bytes" in w for w in create()[0].job.warnings)
    assert create(adapter={"kind": "lora"})[0].job.warnings == []


def test_rows_that_teach_nothing_are_refused_or_skipped(bench, create):
    mute = {"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "weight": 0}]}
    with pytest.raises(InvalidRequest, match="line 2: every turn is left out") as caught:
        create(dataset={"rows": [GOOD, mute]})
    assert (caught.value.code, [error["line"] for error in caught.value.errors]) == ("invalid_data", [2])
    with pytest.raises(InvalidRequest, match="2 of 2 rows cannot be used"):
        create(dataset={"rows": [mute, mute]}, training={"invalid_rows": "skip"})
    assert nothing_is_left(bench)
    job = create(dataset={"rows": [GOOD, mute]}, training={"invalid_rows": "skip"})[0].job
    assert "1 of 2 rows are bad and left out; the first is line 2: every turn is left out" in job.warnings[0]
    assert job.spec["dataset"]["report"]["num_errors"] == 1
    assert create(dataset={"rows": [mute, GOOD]}, training={"train_on": "all"})[0].job.warnings == []


def test_the_spec_says_what_the_caller_wrote_and_what_was_chosen(bench):
    job = bench.submit(training={"learning_rate": 1e-3}, adapter={"kind": "lora", "rank": 4})
    assert job.spec["asked"] == {"model": "tiny", "training": {"learning_rate": 1e-3}, "adapter": {"kind": "lora", "rank": 4}}
    assert job.spec["training"]["num_epochs"] == 1
