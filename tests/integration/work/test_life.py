"""Jobs from submission to their end, over restarts of the service."""

from __future__ import annotations

import asyncio
import time

import pytest

from posttrain_service.errors import Conflict
from posttrain_service.runs.read import metrics
from posttrain_trainer.contract.rundir import RunDir


def event_types(server, job_uuid):
    return [event.type for event in server.jobs.events(job_uuid).data]


def test_a_job_runs_to_its_end_and_everything_about_it_is_told(server):
    job_uuid = server.submit(metadata={"team": "a"})
    job = server.wait_for(job_uuid, "succeeded")
    assert (job.reason, job.error, job.attempt) == ("completed", None, 1)
    assert "a word of warning" in job.warnings
    view = server.jobs.get(job_uuid)
    assert (view.progress["step"], view.progress["percent"]) == (4, 100.0)
    assert view.metrics["loss"] == 0.25
    types = [t for t in event_types(server, job_uuid) if t != "warning"]
    # On a busy machine the short run may be over before it is seen to run.
    assert [t for t in types if t not in ("phase", "ended")] == ["queued", "launching", "running", "succeeded"]
    assert [t for t in types if t in ("phase", "ended")] == ["phase", "ended"]
    assert "step 4 ✓" in server.jobs.logs(job_uuid, tail=1).text
    assert server.jobs.log_sources(job_uuid) == {1: ["torchrun", "rank-0"]}
    assert server.runtime.store.slots.taken() == []
    assert job.expires_at == pytest.approx(job.ended_at + server.settings.retention_ttl_s, abs=1)


def test_from_submission_to_running_nothing_waits_for_a_poll(server):
    server.runtime.stop()
    server.settings = server.settings.model_copy(update={"supervise_interval_s": 3600.0})
    server.start()
    job_uuid = server.submit("wait")
    server.wait_for(job_uuid, "running")
    server.jobs.cancel(job_uuid)
    server.wait_for(job_uuid, "cancelled")


def test_a_failing_trainer_fails_its_job_with_its_own_error_and_the_next_job_runs(server):
    bad = server.submit("fail")
    good = server.submit()
    job = server.wait_for(bad, "failed")
    assert (job.reason, job.error["code"], job.error["message"], job.error["rank"]) == (
        "out_of_memory", "out_of_memory", "no memory left", 0,
    )  # fmt: skip
    assert "Traceback: the reason" in job.error["log_tail"]
    server.wait_for(good, "succeeded")


def test_one_device_is_one_job_at_a_time(server):
    first, second = server.submit("wait"), server.submit("wait")
    server.wait_for(first, "running")
    assert server.jobs.get(second).queue_position == 1
    assert server.job(second).state == "queued"
    server.go(first)
    server.wait_for(second, "running")
    server.go(second)
    server.wait_for(second, "succeeded")


def test_cancel_in_the_queue_and_while_running(server):
    first, second = server.submit("wait"), server.submit()
    server.wait_for_step(first, 2)
    assert server.jobs.cancel(second).job.state == "cancelled"
    server.jobs.cancel(first)
    server.wait_for(first, "cancelled")
    assert server.alive(first) == []
    assert server.jobs.cancel(first).job.state == "cancelled"
    assert not (server.run_path(second) / "starts").exists()


def test_a_run_that_is_deaf_to_sigterm_is_cancelled_within_the_grace(server):
    job_uuid = server.submit("wait deaf")
    server.wait_for_step(job_uuid, 2)
    server.jobs.cancel(job_uuid)
    server.wait_for(job_uuid, "cancelled")
    assert server.alive(job_uuid) == []


def test_a_succeeded_job_cannot_be_cancelled_but_deleted(server):
    job_uuid = server.submit()
    server.wait_for(job_uuid, "succeeded")
    with pytest.raises(Conflict):
        server.jobs.cancel(job_uuid)
    folder = server.run_path(job_uuid)
    server.jobs.delete(job_uuid)
    assert not folder.exists()
    assert server.runtime.store.jobs.get(job_uuid) is None


def test_pause_and_resume(server):
    job_uuid = server.submit("wait")
    server.wait_for_step(job_uuid, 2)
    server.jobs.pause(job_uuid)
    assert server.wait_for(job_uuid, "paused").reason == "paused"
    server.jobs.resume(job_uuid)
    server.go(job_uuid)
    assert server.wait_for(job_uuid, "succeeded").attempt == 2


def test_retry_of_a_failed_job_is_a_new_attempt(server):
    job_uuid = server.submit("fail-once")
    server.wait_for(job_uuid, "failed")
    server.jobs.retry(job_uuid)
    job = server.wait_for(job_uuid, "succeeded")
    assert (job.attempt, job.error) == (2, None)
    assert [point["attempt"] for point in server.jobs.metrics(job_uuid)] == [2, 2, 2, 2]


def test_a_rebuilt_service_adopts_a_running_job_and_finishes_it_once(server):
    job_uuid = server.submit("wait")
    server.wait_for_step(job_uuid, 2)
    server.runtime.stop()
    server.start()
    assert server.job(job_uuid).state == "running"
    server.go(job_uuid)
    job = server.wait_for(job_uuid, "succeeded")
    assert (job.attempt, server.starts(job_uuid)) == (1, [1])
    assert event_types(server, job_uuid).count("phase") == 1
    assert event_types(server, job_uuid).count("succeeded") == 1


def test_a_job_that_ended_while_no_service_ran_is_finished_by_the_next_one(server):
    job_uuid = server.submit("wait fail")
    server.wait_for_step(job_uuid, 2)
    run_path = server.run_path(job_uuid)
    server.runtime.stop()
    (run_path / "go").touch()
    exit_json = RunDir(run_path).attempt(1).exit
    while not exit_json.exists():
        time.sleep(0.01)
    server.start()
    assert server.wait_for(job_uuid, "failed").reason == "out_of_memory"


def test_queued_jobs_outlive_a_restart(server):
    first, second = server.submit("wait"), server.submit()
    server.wait_for_step(first, 2)
    server.runtime.stop()
    server.start()
    assert server.job(second).state == "queued"
    server.go(first)
    server.wait_for(first, "succeeded")
    server.wait_for(second, "succeeded")
    assert server.starts(second) == [1]


def test_stop_jobs_ends_live_jobs_and_keeps_queued_ones(server):
    first, second = server.submit("wait"), server.submit()
    server.wait_for_step(first, 2)
    server.runtime.stop(stop_jobs=True)
    server.start()
    assert server.job(first).state == "cancelled"
    server.wait_for(second, "succeeded")


async def _collect(stream):
    return [item async for item in stream]


def test_streams_tell_everything_once_and_end_with_the_job(server):
    job_uuid = server.submit()
    streams = server.runtime.services.streams

    async def all_three():
        return await asyncio.gather(*(_collect(s(job_uuid)) for s in (streams.events, streams.logs, streams.metrics)))

    events, logs, points = asyncio.run(all_three())
    end = {"status": "succeeded", "reason": "completed"}
    assert [items[-1].data for items in (events, logs, points)] == [end] * 3
    assert [item.data["type"] for item in events[:-1]] == event_types(server, job_uuid)
    text = "".join(item.data["text"] for item in logs[:-1])
    assert text == "".join(f"step {step} ✓\n" for step in range(1, 5))
    assert [item.data["step"] for item in points[:-1]] == [1, 2, 3, 4]
    assert [item.data["loss"] for item in points[:-1]] == [p["loss"] for p in metrics(RunDir(server.run_path(job_uuid)))]


def test_streams_resume_after_any_cursor(server):
    job_uuid = server.submit("fail-once")
    server.wait_for(job_uuid, "failed")
    server.jobs.retry(job_uuid)
    server.wait_for(job_uuid, "succeeded")
    streams = server.runtime.services.streams
    for make in (streams.events, streams.metrics, streams.logs):
        whole = asyncio.run(_collect(make(job_uuid)))
        for number, item in enumerate(whole[:-1]):
            assert asyncio.run(_collect(make(job_uuid, after=item.id))) == whole[number + 1 :]


def test_a_stream_is_cut_without_an_end_when_the_server_stops(server):
    job_uuid = server.submit("wait")
    server.wait_for_step(job_uuid, 2)
    streams = server.runtime.services.streams

    async def follow():
        items = []
        async for item in streams.logs(job_uuid):
            items.append(item)
            streams.close()
        return items

    assert all(item.event == "log" for item in asyncio.run(follow()))
    server.go(job_uuid)
    server.wait_for(job_uuid, "succeeded")
