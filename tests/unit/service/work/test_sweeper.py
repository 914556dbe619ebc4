"""Removing what has outlived its time."""

import io
import json
import os

import pytest

from posttrain_service.errors import NotFound, QuotaExceeded
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.work import quota
from posttrain_service.work.sweeper import LEFTOVER_AGE_S

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def ended(bench, **changes):
    job = bench.submit(**changes)
    bench.jobs.cancel(job.job_uuid)
    return job


def folder(bench, job):
    return bench.runtime.settings.jobs_dir / job.run_id


def exists(bench, job):
    return bench.runtime.store.jobs.exists(job.run_id)


def upload(bench, **options):
    return bench.runtime.services.files.create(
        io.BytesIO(json.dumps(GOOD).encode()), filename="a.jsonl", purpose="fine-tune", **options
    )


def age(path, clock, seconds):
    os.utime(path, (clock.now() - seconds,) * 2)


def test_ended_jobs_go_when_their_time_is_over_and_kept_or_live_ones_stay(bench):
    short = ended(bench, retention={"ttl_s": 10})
    kept = ended(bench, retention={"keep": True})
    usual = ended(bench)
    queued = bench.submit()
    bench.clock.advance(11)
    swept = bench.runtime.sweeper.sweep()
    assert swept.jobs == [short.job_uuid]
    assert (folder(bench, short).exists(), exists(bench, short)) == (False, False)
    bench.clock.advance(bench.runtime.settings.retention_ttl_s)
    assert bench.runtime.sweeper.sweep().jobs == [usual.job_uuid]
    assert exists(bench, kept)
    assert folder(bench, kept).exists()
    assert exists(bench, queued)


def test_the_outlook_names_it_and_touches_nothing(bench):
    job = ended(bench, retention={"ttl_s": 10})
    file = upload(bench, expires_after_s=3600)
    bench.clock.advance(3601)
    outlook = bench.runtime.sweeper.outlook()
    assert (outlook.jobs, outlook.files) == ([job.job_uuid], [file.id])
    assert exists(bench, job)
    assert folder(bench, job).exists()
    assert bench.runtime.sweeper.sweep().files == [file.id]


def test_a_deletion_that_was_interrupted_is_finished_by_the_next_round(bench, monkeypatch):
    job = ended(bench, retention={"ttl_s": 10})
    bench.clock.advance(11)

    def crash(run_id):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.runtime.store.jobs, "delete", crash)
        with pytest.raises(KeyboardInterrupt):
            bench.runtime.sweeper.sweep()
    assert not folder(bench, job).exists()
    with pytest.raises(NotFound):  # hidden since before its first file went
        bench.jobs.get(job.job_uuid)
    assert bench.runtime.sweeper.sweep().jobs == [job.job_uuid]
    assert not exists(bench, job)


def test_an_expired_file_stays_while_a_job_needs_it(bench):
    file = upload(bench, expires_after_s=3600)
    job = bench.submit(dataset=file.id)
    bench.clock.advance(3601)
    assert bench.runtime.sweeper.sweep().files == []
    bench.jobs.cancel(job.job_uuid)
    assert bench.runtime.sweeper.sweep().files == [file.id]
    assert not (bench.runtime.settings.files_dir / file.id).exists()


def test_leftovers_of_crashes_go_after_a_while_and_nothing_else_does(bench, tmp_path):
    job = bench.submit()
    jobs_dir, files_dir = bench.runtime.settings.jobs_dir, bench.runtime.settings.files_dir
    old = jobs_dir / "11111111-2222-3333-4444-555555555555"
    young = jobs_dir / "11111111-2222-3333-4444-666666666666"
    foreign = jobs_dir / "notes"
    scratch = jobs_dir.parent / ".check-abc"
    for path in (old, young, foreign, scratch):
        path.mkdir()
    (files_dir / ("file-" + "a" * 32)).write_text("x")
    for path in (old, foreign, scratch, folder(bench, job), files_dir / ("file-" + "a" * 32)):
        age(path, bench.clock, LEFTOVER_AGE_S + 1)
    age(young, bench.clock, 10)
    swept = bench.runtime.sweeper.sweep()
    assert swept.leftovers == ["file-" + "a" * 32, old.name, scratch.name]
    assert sorted(path.name for path in jobs_dir.iterdir()) == sorted([young.name, foreign.name, job.run_id])


def test_forgotten_keys_are_counted(bench, make_bench):
    body = JobRequest.model_validate({"model": "tiny", "dataset": {"rows": [GOOD]}})
    bench.jobs.create(body, idempotency_key="k")
    assert bench.runtime.sweeper.sweep().keys == 0
    bench.clock.advance(bench.runtime.settings.idempotency_ttl_s)
    assert bench.runtime.sweeper.sweep().keys == 1
    assert bench.jobs.create(body, idempotency_key="k")[1] is True


def test_a_round_is_the_leaders(make_bench):
    first = make_bench()
    job = ended(first, retention={"ttl_s": 1})
    first.rounds()
    second = make_bench(backend=first.backend)
    first.clock.advance(2)
    second.runtime.loops[2].round()
    assert exists(first, job)
    first.runtime.loops[2].round()
    assert not exists(first, job)


def test_storage_quotas_refuse_with_the_numbers_and_give_way_to_deletion(make_bench, monkeypatch):
    monkeypatch.setattr(quota, "FRESH_S", 0.0)
    bench = make_bench(owner_quota_bytes=10_000, storage_quota_bytes=25_000)
    files = bench.runtime.services.files

    def add(owner, size):
        return files.create(io.BytesIO(b"x" * size), filename="a.jsonl", purpose="fine-tune", owner=owner)

    first = add("ann", 9_000)
    with pytest.raises(QuotaExceeded, match=r"owner 'ann' has 10,500 bytes.*10,000 is the quota.*POSTTRAIN_OWNER_QUOTA_BYTES"):
        add("ann", 1_500)
    assert [path.name for path in bench.runtime.settings.files_dir.iterdir()] == [first.id]
    add("bob", 9_000)
    with pytest.raises(QuotaExceeded, match="all owners together have 25,500 bytes"):
        add("cid", 7_500)
    files.delete(first.id)
    add("ann", 1_500)


def test_what_runs_have_written_counts_and_is_measured_once_when_they_have_ended(make_bench, monkeypatch):
    monkeypatch.setattr(quota, "FRESH_S", 0.0)
    bench = make_bench(owner_quota_bytes=1_000_000)
    job = ended(bench)
    used = bench.runtime.services.files.quota.used()["default"]
    assert used == sum(path.stat().st_size for path in folder(bench, job).rglob("*") if path.is_file())
    live = bench.submit()
    measured = []
    monkeypatch.setattr(quota, "tree_bytes", lambda path: measured.append(path.name) or 2_000_000)
    assert bench.runtime.services.files.quota.used()["default"] == used + 2_000_000
    assert measured == [live.run_id]
    with pytest.raises(QuotaExceeded):
        bench.submit()
    assert not any(path.name not in (job.run_id, live.run_id) for path in bench.runtime.settings.jobs_dir.iterdir())


def test_without_quotas_nothing_is_measured(bench, monkeypatch):
    monkeypatch.setattr(quota, "tree_bytes", pytest.fail)
    bench.submit()
    upload(bench)
