"""Streams: heartbeats, cursors, and the choice of the log."""

import asyncio
import tracemalloc

import pytest

from posttrain_service.errors import InvalidRequest, NotFound, Unavailable
from posttrain_service.runs.read import MAX_POINT_BYTES
from posttrain_service.work.streams import HEARTBEAT_S, POLL_S, Streams, cursor, event_cursor, named


async def no_wait(seconds):
    await asyncio.sleep(0)


def streams(bench, sleep=no_wait):
    return Streams(bench.runtime.settings, bench.runtime.store, sleep=sleep)


@pytest.mark.parametrize("kind", ["events", "logs", "metrics"])
def test_a_silent_stream_beats(bench, kind):
    job = bench.run()
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    async def first_beat():
        async for item in getattr(streams(bench, sleep), kind)(job.job_uuid):
            if item.event == "heartbeat":
                return item

    beat = asyncio.run(first_beat())
    assert (beat.id, beat.data) == (None, {})
    assert HEARTBEAT_S - POLL_S <= sum(slept) <= HEARTBEAT_S + POLL_S


@pytest.mark.parametrize("kind", ["events", "logs", "metrics"])
def test_a_job_that_was_never_launched_ends_its_streams(bench, kind):
    job = bench.submit()
    bench.jobs.cancel(job.job_uuid)

    async def collect():
        return [item async for item in getattr(streams(bench), kind)(job.job_uuid)]

    items = asyncio.run(collect())
    assert (items[-1].event, items[-1].data) == ("end", {"status": "cancelled", "reason": "cancelled"})
    assert {item.event for item in items[:-1]} <= {"event"}


@pytest.mark.parametrize("kind", ["events", "logs", "metrics"])
def test_unknown_jobs_and_bad_cursors_are_refused_before_anything_is_sent(bench, kind):
    job = bench.submit()
    open_stream = getattr(streams(bench), kind)
    with pytest.raises(NotFound):
        open_stream("nope")
    with pytest.raises(InvalidRequest):
        open_stream(job.job_uuid, after="x")


def test_a_closed_service_opens_no_stream(bench):
    job = bench.submit()
    closed = streams(bench)
    closed.close()
    with pytest.raises(Unavailable):
        closed.events(job.job_uuid)


def test_logs_begin_with_the_first_rank_and_fall_back_to_the_launcher(bench):
    job = bench.run()
    paths = bench.run_dir(job).attempt(1)
    paths.logs.mkdir(parents=True)
    paths.torchrun_log.write_text("no rank came up\n")
    bench.ends(job, 1)
    bench.rounds()

    async def collect():
        return [item async for item in streams(bench).logs(job.job_uuid)]

    log, end = asyncio.run(collect())
    assert log.data == {"text": "no rank came up\n", "source": "torchrun", "attempt": 1}
    assert (log.id, end.data["status"]) == ("1:16", "failed")


@pytest.mark.parametrize("text", ["1", "0:5", "1:-5", "a:b", "1:2:3", "1: 2"])
def test_cursors_that_are_none(text):
    with pytest.raises(InvalidRequest):
        cursor(text)


def test_cursors():
    assert [cursor(text) for text in (None, "", "2:17")] == [(1, 0), (1, 0), (2, 17)]
    assert [event_cursor(text) for text in (None, "", "7")] == [None, None, 7]
    with pytest.raises(InvalidRequest):
        event_cursor("1:2")


def test_named_points():
    point = {"step": 1, "attempt": 1, "loss": 2.0, "grad_norm": 1.0}
    assert named(point, ["loss"]) == {"step": 1, "attempt": 1, "loss": 2.0}
    assert named(point, ["accuracy"]) is None
    assert named(point, None) == point


@pytest.mark.parametrize(("offset", "steps"), [(0, [1, 2]), (5, [1, 2]), (11, [2]), (15, [2]), (22, []), (10**9, [])])
def test_a_cursor_inside_a_record_goes_back_and_one_beyond_the_end_replays_nothing(bench, offset, steps):
    job = bench.run()
    metrics = bench.run_dir(job).attempt(1).metrics
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_bytes(b'{"step":1}\n{"step":2}\n')
    bench.ends(job, result={"status": "completed", "steps": 2})
    bench.rounds()

    async def collect():
        return [item async for item in streams(bench).metrics(job.job_uuid, after=f"1:{offset}") if item.event == "metric"]

    found = asyncio.run(collect())
    assert [item.data["step"] for item in found] == steps
    assert [item.id for item in found] == [f"1:{11 * step}" for step in steps]


def test_a_line_of_metrics_that_never_ends_does_not_grow_the_stream(bench):
    job = bench.run()
    metrics = bench.run_dir(job).attempt(1).metrics
    metrics.parent.mkdir(parents=True, exist_ok=True)
    endless = 24 * MAX_POINT_BYTES
    with metrics.open("wb") as file:
        file.write(b'{"step":1}\n')
        file.truncate(endless)  # zeros without any line feed, that take no disk
        file.seek(endless)
        file.write(b'\n{"step":3}\n' + b"x" * 100)
    bench.ends(job, result={"status": "completed", "steps": 3})
    bench.rounds()

    async def collect():
        return [item async for item in streams(bench).metrics(job.job_uuid) if item.event == "metric"]

    tracemalloc.start()
    try:
        items = asyncio.run(collect())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(item.data["step"], item.id) for item in items] == [(1, "1:11"), (3, f"1:{endless + 12}")]
    assert peak < 6 * MAX_POINT_BYTES
