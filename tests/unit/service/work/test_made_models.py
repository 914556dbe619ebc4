"""What a job has made is a model that further jobs start from, by its name."""

import hashlib
import json
import shutil

import pytest

from posttrain_service.errors import InvalidRequest, NotFound
from posttrain_service.work import made as making
from posttrain_trainer.contract.rundir import write_json

CONFIG = json.dumps({"max_position_embeddings": 64}).encode()


def checkpoint(bench, job, step, kind="full", folders=("model",)):
    folder = bench.run_dir(job).checkpoint(f"step-{step:06d}")
    files = []
    for name, data in (("config.json", CONFIG), ("model.safetensors", f"{job.job_uuid} {step}".encode())):
        for part in folders:
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / name).write_bytes(part.encode() + data if name != "config.json" else data)
            path = folder / part / name
            files.append({"path": f"{part}/{name}", "size_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    write_json(folder / "manifest.json", {"id": folder.name, "step": step, "epoch": 1.0, "created_at": 5.0, "kind": kind, "files": files, "metrics": {}})


@pytest.fixture
def made(bench):
    """A job that succeeded, with two checkpoints."""
    job = bench.run(name="first")
    checkpoint(bench, job, 2)
    checkpoint(bench, job, 10)
    bench.ends(job, result={"status": "completed", "steps": 10})
    bench.rounds()
    return bench.job(job)


def name_of(job, step=None):
    return f"ft:tiny:posttrain:first:{job.job_uuid}" + ("" if step is None else f":ckpt-step-{step}")


@pytest.mark.parametrize(("step", "weights"), [(None, 10), (2, 2)])
def test_a_further_job_starts_from_weights_of_its_own(bench, made, step, weights):
    job = bench.submit(model=name_of(made, step), name="second")
    assert (job.state, job.model, job.spec["data"]["model"]) == ("queued", name_of(made, step), "data/model")
    assert job.spec["training"]["max_seq_len"] == 64, "the limit of the result's own config"
    bench.jobs.delete(made.job_uuid)  # the earlier job may go
    bench.rounds(2)
    assert bench.job(job).state == "running"
    folder = bench.run_dir(job).path / "data/model"
    assert (folder / "model.safetensors").read_bytes() == f"model{made.job_uuid} {weights}".encode()


def test_the_trainer_is_given_that_folder(bench, made):
    from posttrain_service.work.prepare import train_arguments

    job = bench.submit(model=name_of(made))
    args = train_arguments(job.spec, bench.run_dir(job), bench.runtime.settings.base_models_dir)
    assert args.model_path == str(bench.run_dir(job).path / "data/model")


def test_results_are_listed_after_the_base_models_newest_first(bench, made):
    second = bench.run()
    checkpoint(bench, second, 4, kind="adapter")
    bench.ends(second, result={"status": "completed", "steps": 4})
    bench.rounds()
    without = bench.run()
    bench.ends(without, result={"status": "completed", "steps": 4})
    bench.rounds()
    service = bench.runtime.services.models
    page = service.page()
    assert [(v.id, v.kind, v.trainable, v.checkpoint) for v in page.data] == [
        ("tiny", "base", True, None),
        (f"ft:tiny:posttrain::{second.job_uuid}", "adapter", False, "step-000004"),
        (name_of(made), "full", True, "step-000010"),
    ]
    walked, after = [], None
    while True:
        step = service.page(after=after, limit=1)
        walked += [view.id for view in step.data]
        after = step.last_id
        if not step.has_more:
            break
    assert walked == [view.id for view in page.data]
    assert service.get(name_of(made, 2)).checkpoint == "step-000002"
    assert bench.jobs.get(made.job_uuid).job.state == "succeeded"


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"after": "nope"}, {"after": "ft:tiny:posttrain::nobody"}])
def test_pages_that_cannot_be(bench, query):
    with pytest.raises(InvalidRequest):
        bench.runtime.services.models.page(**query)


def test_what_is_not_there_is_refused_by_name(bench, made):
    service = bench.runtime.services.models
    for name in ("ft:tiny:posttrain:first:nobody", name_of(made, 3), f"ft:tiny:posttrain:other:{made.job_uuid}", f"ft:big:posttrain:first:{made.job_uuid}"):
        with pytest.raises(NotFound):
            service.get(name)
        with pytest.raises(InvalidRequest) as caught:
            bench.submit(model=name)
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(NotFound):
        service.get("nope")
    running = bench.run(name="first")
    checkpoint(bench, running, 2)
    with pytest.raises(InvalidRequest, match="is running and has no result yet"):
        bench.submit(model=name_of(running))
    assert bench.submit(model=name_of(running, 2)).state == "queued"


def test_an_adapter_needs_its_merged_model(bench):
    job = bench.run(name="first")
    checkpoint(bench, job, 2, kind="adapter")
    checkpoint(bench, job, 4, kind="adapter", folders=("model", "merged"))
    bench.ends(job, result={"status": "completed", "steps": 4})
    bench.rounds()
    with pytest.raises(InvalidRequest, match="merge_lora") as caught:
        bench.submit(model=name_of(job, 2))
    assert caught.value.code == "model_is_adapter"
    further = bench.submit(model=name_of(job))
    weights = bench.run_dir(further).path / "data/model/model.safetensors"
    assert weights.read_bytes() == f"merged{job.job_uuid} 4".encode()


def test_a_result_that_goes_while_it_is_placed_leaves_no_half_model(bench, made, monkeypatch):
    source = bench.run_dir(made).checkpoint("step-000010")
    link = making._link

    def racing(here, there):
        link(here, there)
        shutil.rmtree(source, ignore_errors=True)

    monkeypatch.setattr(making, "_link", racing)
    with pytest.raises(InvalidRequest, match="removed just now"):
        bench.submit(model=name_of(made))
    assert [view.job.job_uuid for view in bench.jobs.page().data] == [made.job_uuid]
    assert len(list(bench.runtime.settings.jobs_dir.iterdir())) == 1


def test_a_result_on_another_file_system_is_copied(bench, made, monkeypatch):
    def refuse(*paths, **options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(making.os, "link", refuse)
    job = bench.submit(model=name_of(made))
    weights = bench.run_dir(job).path / "data/model/model.safetensors"
    assert weights.stat().st_nlink == 1
    assert weights.read_bytes() == f"model{made.job_uuid} 10".encode()


def test_a_result_of_a_result_has_a_name_that_leads_to_it(bench, made):
    second = bench.submit(model=name_of(made), name="second")
    bench.rounds(2)
    checkpoint(bench, second, 3)
    bench.ends(bench.job(second), result={"status": "completed", "steps": 3})
    bench.rounds()
    name = bench.runtime.services.models.page().data[1].id
    assert bench.runtime.services.models.get(name).job_uuid == second.job_uuid
    assert bench.submit(model=name).state == "queued"
