"""Jobs as the faces see them: verbs, pages, logs, checkpoints."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from posttrain_service.errors import Conflict, InvalidRequest, NotFound
from posttrain_trainer.contract.rundir import write_json


def checkpoint(bench, job, step, metrics=None):
    folder = bench.run_dir(job).checkpoint(f"step-{step:06d}")
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "a.bin").write_bytes(b"abc")
    files = [{"path": "model/a.bin", "size_bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}]
    manifest = {"id": folder.name, "step": step, "epoch": 1.0, "created_at": 1.0, "kind": "full", "files": files}
    write_json(folder / "manifest.json", manifest | {"metrics": metrics or {}})


def log(bench, job, text, source="rank-0", attempt=1):
    paths = bench.run_dir(job).attempt(attempt)
    paths.logs.mkdir(parents=True, exist_ok=True)
    (paths.logs / f"{source}.log").write_bytes(text)


@pytest.mark.parametrize("verb", ["get", "cancel", "pause", "resume", "retry", "delete", "events", "logs", "log_sources", "metrics", "checkpoints"])
def test_an_unknown_job_is_not_found(bench, verb):
    with pytest.raises(NotFound, match="there is no job 'nope'"):
        getattr(bench.jobs, verb)("nope")


def test_verbs_of_an_ended_job(bench):
    job = bench.submit()
    bench.jobs.cancel(job.job_uuid)
    assert bench.jobs.cancel(job.job_uuid).job.state == "cancelled"
    for verb in (bench.jobs.pause, bench.jobs.resume):
        with pytest.raises(Conflict):
            verb(job.job_uuid)
    again = bench.jobs.retry(job.job_uuid).job
    assert (again.state, again.reason, again.ended_at, again.expires_at) == ("queued", None, None, None)
    assert bench.jobs.retry(job.job_uuid).job.state == "queued"


def test_a_live_job_is_not_deleted(bench):
    job = bench.run()
    with pytest.raises(Conflict, match="cancel it first"):
        bench.jobs.delete(job.job_uuid)


def test_a_queued_job_is_paused_and_resumed_without_a_run(bench):
    job = bench.submit()
    assert bench.jobs.pause(job.job_uuid).job.state == "paused"
    bench.rounds()
    assert bench.backend.named("start") == []
    view = bench.jobs.resume(job.job_uuid)
    assert (view.job.state, view.queue_position) == ("queued", 1)


def test_pages(bench):
    jobs = [bench.submit(metadata={"n": str(number)}) for number in range(3)]
    page = bench.jobs.page(limit=2)
    assert [view.job.job_uuid for view in page.data] == [job.job_uuid for job in jobs[:0:-1]]
    assert [view.queue_position for view in page.data] == [3, 2]
    assert (page.has_more, page.last_id) == (True, jobs[1].job_uuid)
    assert [view.job.job_uuid for view in bench.jobs.page(after=page.last_id).data] == [jobs[0].job_uuid]
    assert [view.job.job_uuid for view in bench.jobs.page(metadata={"n": "1"}).data] == [jobs[1].job_uuid]
    assert bench.jobs.page(status=["running"]).data == []


@pytest.mark.parametrize(("query", "param"), [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"status": ["lost"]}, "status")])
def test_a_page_that_cannot_be(bench, query, param):
    with pytest.raises(InvalidRequest) as caught:
        bench.jobs.page(**query)
    assert caught.value.param == param


def test_logs_by_lines_and_bytes(bench):
    job = bench.run()
    log(bench, job, b"torchrun\n", "torchrun")
    assert bench.jobs.logs(job.job_uuid).source == "torchrun"
    log(bench, job, "one\ntwo ✓\nthree".encode())
    tail = bench.jobs.logs(job.job_uuid, tail=2)
    assert (tail.text, tail.source, tail.offset, tail.next_offset, tail.size_bytes) == ("two ✓\nthree", "rank-0", 4, 17, 17)
    assert bench.jobs.logs(job.job_uuid, offset=4, limit=6).text == "two "
    assert bench.jobs.logs(job.job_uuid, offset=17).text == ""
    assert bench.jobs.log_sources(job.job_uuid) == {1: ["torchrun", "rank-0"]}


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"tail": 1, "offset": 0}, InvalidRequest),
        ({"tail": -1}, InvalidRequest),
        ({"offset": -1}, InvalidRequest),
        ({"limit": 0}, InvalidRequest),
        ({"source": "../../passwd"}, InvalidRequest),
        ({"source": "rank-7"}, NotFound),
        ({"attempt": 2}, NotFound),
        ({"attempt": 0}, NotFound),
    ],
)
def test_logs_that_cannot_be(bench, query, error):
    job = bench.run()
    with pytest.raises(error):
        bench.jobs.logs(job.job_uuid, **query)


def test_a_job_that_was_never_launched_has_no_logs(bench):
    with pytest.raises(NotFound, match="not been launched"):
        bench.jobs.logs(bench.submit().job_uuid)


def test_checkpoints_are_listed_in_order_read_and_deleted(bench):
    job = bench.run(training={"best_metric": "loss"})
    for step, loss in ((100, 2.0), (2, 1.0), (10, 3.0)):
        checkpoint(bench, job, step, {"loss": loss})
    found = bench.jobs.checkpoints(job.job_uuid)
    assert [(c["step"], c["best"]) for c in found] == [(2, True), (10, False), (100, False)]
    path, size = bench.jobs.checkpoint_file(job.job_uuid, "step-000010", "model/a.bin")
    assert (path.read_bytes(), size) == (b"abc", 3)
    assert bench.jobs.checkpoint_files(job.job_uuid, "step-000010") == [("model/a.bin", path, 3)]
    with pytest.raises(NotFound):
        bench.jobs.checkpoint(job.job_uuid, "step-000003")
    with pytest.raises(Conflict):
        bench.jobs.delete_checkpoint(job.job_uuid, "step-000010")
    bench.ends(job, result={"status": "completed", "steps": 1})
    bench.rounds()
    bench.jobs.delete_checkpoint(job.job_uuid, "step-000010")
    assert [c["step"] for c in bench.jobs.checkpoints(job.job_uuid)] == [2, 100]


@pytest.mark.parametrize("waiting", ["paused", "queued"])
def test_what_a_waiting_job_goes_on_from_is_not_deleted(bench, waiting):
    job = bench.run()
    checkpoint(bench, job, 2)
    bench.jobs.pause(job.job_uuid)
    bench.rounds()
    bench.ends(job, 1, result={"status": "stopped", "want": "pause", "checkpoint": "step-000002"})
    bench.rounds()
    assert bench.jobs.get(job.job_uuid).job.state == "paused"
    if waiting == "queued":
        bench.jobs.resume(job.job_uuid)
    with pytest.raises(Conflict, match=f"is {waiting} and goes on from its checkpoints; cancel it"):
        bench.jobs.delete_checkpoint(job.job_uuid, "step-000002")
    assert [c["step"] for c in bench.jobs.checkpoints(job.job_uuid)] == [2]
    bench.jobs.cancel(job.job_uuid)
    bench.jobs.delete_checkpoint(job.job_uuid, "step-000002")
    assert list(bench.run_dir(job).checkpoints.iterdir()) == []


def test_a_retry_waits_until_a_checkpoint_is_out_of_sight(bench, monkeypatch):
    """Else it would go on from a checkpoint whose files vanish under it, or have its new one of that name removed."""
    job = bench.submit()
    checkpoint(bench, job, 2)
    bench.jobs.cancel(job.job_uuid)
    seen, real = [], type(bench.run_dir(job).path).rename

    def rename(path, target):
        asked = pool.submit(bench.jobs.retry, job.job_uuid)
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        seen.append(asked)
        return real(path, target)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(type(bench.run_dir(job).path), "rename", rename)
        bench.jobs.delete_checkpoint(job.job_uuid, "step-000002")
        assert seen[0].result(10).job.state == "queued"
    assert bench.jobs.checkpoints(job.job_uuid) == []


@pytest.mark.parametrize("checkpoint_id", ["../..", "step-1", "", "step-000002/../x"])
@pytest.mark.parametrize("path", ["model/a.bin", "../../spec.json"])
def test_checkpoint_paths_lead_nowhere_else(bench, checkpoint_id, path):
    job = bench.run()
    checkpoint(bench, job, 2)
    with pytest.raises(NotFound):
        bench.jobs.checkpoint_file(job.job_uuid, checkpoint_id, path)


def test_max_points_has_bounds(bench):
    job = bench.run()
    with pytest.raises(InvalidRequest):
        bench.jobs.metrics(job.job_uuid, max_points=0)


def test_a_log_that_is_a_link_is_absent(bench, tmp_path):
    job = bench.run()
    log(bench, job, b"x", "rank-1")
    (tmp_path / "secret").write_text("secret")
    bench.run_dir(job).attempt(1).rank_log(0).symlink_to(tmp_path / "secret")
    with pytest.raises(NotFound):
        bench.jobs.logs(job.job_uuid, source="rank-0")
    assert bench.jobs.logs(job.job_uuid).source == "rank-1"


def test_a_job_deleted_by_many_is_deleted_or_not_found(bench):
    job = bench.run()
    bench.ends(job, result={"status": "completed", "steps": 1})
    bench.rounds()
    for n in range(50):
        (bench.run_dir(job).path / f"more/{n}/deep").mkdir(parents=True)

    def delete(_):
        try:
            bench.jobs.delete(job.job_uuid)
        except NotFound:
            return "not found"
        return "deleted"

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(delete, range(6)))
    assert "deleted" in answers
    assert not bench.run_dir(job).path.exists()
    with pytest.raises(NotFound):
        bench.jobs.get(job.job_uuid)
