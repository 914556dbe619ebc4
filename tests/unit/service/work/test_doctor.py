"""The doctor: nothing to say of what is well, and a plain sentence for each thing that isn't."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest

from posttrain_service.errors import Unavailable
from posttrain_service.work import doctor as doctor_module
from posttrain_service.work.doctor import Doctor
from posttrain_trainer.contract import CONTRACT_VERSION

GOOD = {"contract": CONTRACT_VERSION, "packages": {"torch": "2"}}


@pytest.fixture
def answer(monkeypatch):
    """What the trainer answers, to be changed by a test."""
    said = dict(GOOD)

    def tool(*_arguments):
        if "fault" in said:
            raise Unavailable(said["fault"])
        return said

    monkeypatch.setattr(doctor_module, "run_tool", tool)
    return said


def look(bench, **settings) -> list[str]:
    runtime = bench.runtime
    changed = runtime.settings.model_copy(update=settings)
    found = Doctor(changed, runtime.store, ("cpu:0",)).examine()
    return [f"{one.level}: {one.about}: {one.message}" for one in found]


def test_a_healthy_server_with_a_running_job_has_nothing(bench, answer):
    bench.run()
    assert look(bench) == []


def test_each_job_that_waits_is_told_why(bench, answer):
    first = bench.run()
    second = bench.submit()
    third = bench.submit(resources={"priority": 5})
    paused = bench.submit()
    bench.jobs.pause(paused.job_uuid)
    taken = f"it waits for devices (1); taken are cpu:0 by job {first.job_uuid}"
    assert look(bench) == [
        f"note: job {third.job_uuid}: queued at place 1 of 2: {taken}",
        f"note: job {second.job_uuid}: queued at place 2 of 2: {taken}",
        f"note: job {paused.job_uuid}: paused (paused): the job was paused while it was queued; "
        f"to go on: posttrain jobs resume {paused.job_uuid}",
    ]
    low = look(bench, disk_reserve_bytes=2**59)
    assert low[0].startswith("error: disk: ")
    assert "nothing is launched: " in low[1]


def test_a_job_that_a_full_disk_paused_says_so_and_goes_on(bench, answer):
    job = bench.run()
    bench.ends(job, 1, error={"code": "disk_full", "message": "a checkpoint needs more", "rank": 0})
    bench.rounds()
    paused = bench.job(job)
    assert (paused.state, paused.reason, paused.error) == ("paused", "disk_full", None)
    assert "a checkpoint needs more" in paused.warnings
    assert bench.taken() == []
    assert look(bench) == [
        f"note: job {job.job_uuid}: paused (disk_full): the job is paused: a checkpoint needs more; "
        f"to go on: posttrain jobs resume {job.job_uuid}"
    ]
    bench.jobs.resume(job.job_uuid)
    bench.rounds(2)
    assert bench.job(job).attempt == 2


def test_no_server_is_told_once_and_for_each_job(bench, answer):
    job = bench.submit()
    assert look(bench) == [
        "warning: server: no server is acting on this storage: nothing is launched or looked after; start `posttrain serve`",
        f"note: job {job.job_uuid}: queued at place 1 of 1: no server is acting on this storage; start `posttrain serve`",
    ]


def test_orphaned_folders_and_rows_are_found(bench, answer):
    bench.rounds()
    runtime = bench.runtime
    job = bench.run()
    shutil.rmtree(runtime.settings.jobs_dir / job.run_id)
    file = runtime.services.files.create(io.BytesIO(b"x"), filename="a.jsonl", purpose="fine-tune")
    (runtime.settings.files_dir / file.id).rename(runtime.settings.files_dir / ("file-" + "a" * 32))
    (runtime.settings.jobs_dir / "11111111-2222-3333-4444-555555555555").mkdir()
    (runtime.settings.jobs_dir / "notes").mkdir()
    assert look(bench) == [
        "warning: jobs/11111111-2222-3333-4444-555555555555: a run's folder without a job; the sweeper removes it",
        "warning: jobs/notes: not posttrain's; nothing touches it",
        f"error: job {job.job_uuid}: the folder of the job is gone, with its logs and checkpoints; delete the job",
        "warning: files/file-" + "a" * 32 + ": bytes without an entry in the list of files; the sweeper removes them",
        f"error: file {file.id}: the bytes of the file are gone; delete it and upload it again",
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fault": "no module"}, "cannot run the trainer: no module"),
        ({"contract": "x"}, "has a trainer of contract x, this service needs"),
        ({"packages": {}}, "has no torch; install posttrain[train] there"),
    ],
)
def test_faults_of_the_trainers_interpreter(bench, answer, change, says):
    bench.rounds()
    answer.update(change)
    [line] = look(bench)
    assert line.startswith(f"error: trainer: {sys.executable}")
    assert says in line
    [line] = look(bench, trainer_python=Path("/no/such/python"))
    assert line.startswith("error: trainer: /no/such/python is not there")
