"""Removing a checkpoint, its job, and what has outlived its time, all at the same moment."""

import os
import threading
from contextlib import contextmanager

import pytest

from posttrain_service.errors import NotFound
from posttrain_trainer.contract.rundir import write_json

GONE, STAYS = "step-000001", "step-000002"


def made(bench, job, name):
    folder = bench.run_dir(job).checkpoint(name)
    (folder / "model").mkdir(parents=True)
    files = [{"path": f"model/{number}.bin", "size_bytes": 3, "sha256": "0" * 64} for number in range(3)]
    for file in files:
        (folder / file["path"]).write_bytes(b"abc")
    step = int(name.removeprefix("step-"))
    write_json(folder / "manifest.json", {"id": name, "step": step, "epoch": 1.0, "created_at": 1.0, "files": files})


@pytest.fixture
def ended(bench):
    def make():
        job = bench.submit(retention={"ttl_s": 10})
        bench.jobs.cancel(job.job_uuid)
        for name in (GONE, STAYS):
            made(bench, job, name)
        bench.clock.advance(11)
        return job

    return make


def acts(bench, job):
    return {
        "checkpoint": lambda: bench.jobs.delete_checkpoint(job.job_uuid, GONE),
        "job": lambda: bench.jobs.delete(job.job_uuid),
        "sweep": bench.runtime.sweeper.sweep,
    }


def try_to(act):
    try:
        act()
    except NotFound:
        return "not found"
    return "done"


@contextmanager
def interrupted(monkeypatch, at, competitor):
    """Run `competitor` before the call number `at` that takes something off the disk or looks at it; was it reached?"""
    calls, reached = 0, []

    def watched(real):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == at + 1:
                with monkeypatch.context() as inner:
                    for name, function in originals.items():
                        inner.setattr(os, name, function)
                    reached.append(competitor())
            return real(*args, **options)

        return call

    originals = {name: getattr(os, name) for name in ("unlink", "rmdir", "open", "scandir")}
    with monkeypatch.context() as patch:
        for name, function in originals.items():
            patch.setattr(os, name, watched(function))
        yield reached


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in ("checkpoint", "job", "sweep") for b in ("checkpoint", "job", "sweep")])
def test_each_may_come_in_between_any_two_steps_of_another(bench, ended, monkeypatch, first, second):
    store = bench.runtime.store
    for at in range(1000):
        job = ended()
        act = acts(bench, job)
        with interrupted(monkeypatch, at, lambda act=act: try_to(act[second])) as reached:
            assert try_to(act[first]) in ("done", "not found")
        run_dir = bench.run_dir(job)
        assert GONE not in [checkpoint.name for checkpoint in run_dir.checkpoints.glob("*")], at
        if {first, second} == {"checkpoint"}:
            assert [c["id"] for c in bench.jobs.checkpoints(job.job_uuid)] == [STAYS]
        elif reached or first != "checkpoint":
            assert (run_dir.path.exists(), store.jobs.exists(job.run_id)) == (False, False), at
        bench.runtime.sweeper.sweep()
        if not reached:
            break
    assert at > 10, "the steps were not seen"


def test_all_at_once(bench, ended):
    for _ in range(10):
        job = ended()
        start = threading.Barrier(6)
        outcomes, faults = [], []

        def run(act, start=start, outcomes=outcomes, faults=faults):
            start.wait()
            try:
                outcomes.append(try_to(act))
            except BaseException as fault:
                faults.append(fault)

        threads = [threading.Thread(target=run, args=(act,)) for act in acts(bench, job).values() for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert len(outcomes) == 6
        assert (bench.run_dir(job).path.exists(), bench.runtime.store.jobs.exists(job.run_id)) == (False, False)
