"""What Prometheus is told: true of the jobs, bounded in labels, cheap however many jobs have ended."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse
from sqlalchemy import event, text

from posttrain_service.api.measure import watch_lag
from posttrain_service.app import create_app
from posttrain_service.domain.keys import make_key
from posttrain_service.work import gauges
from posttrain_service.work.hints import Hint
from posttrain_service.work.loops import Loop
from posttrain_service.work.meters import Meters
from posttrain_trainer.contract.rundir import write_json

STEP = {"attempt": 1, "step": 3, "epoch": 0.5, "time": 1.0, "loss": 1.5, "learning_rate": 1e-4, "step_time_s": 0.25, "tokens_per_s": 400.0}


def samples(body: str) -> dict[str, float]:
    """`name{label=value,...}` -> value, labels by name."""
    found = {}
    for family in parse(body):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def told(bench) -> dict[str, float]:
    body, content_type = bench.runtime.services.health.metrics("")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return samples(body.decode())


def trains(bench, job, step=STEP) -> None:
    """Have the job's run say what a trainer would."""
    attempt = bench.run_dir(job).attempt(1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    attempt.metrics.write_text(json.dumps(step) + "\n")
    write_json(attempt.heartbeat, {"time": bench.clock.now() - 7, "phase": "train", "step": 3, "total_steps": 9, "eta_s": 60.0})


def test_a_job_is_followed_from_the_queue_to_its_end(bench):
    first = bench.submit()
    bench.clock.advance(20)
    bench.rounds()
    bench.clock.advance(3)
    bench.rounds()
    waiting = bench.submit()
    bench.clock.advance(40)
    first = bench.job(first)
    trains(bench, first)
    now = told(bench)
    assert {state: now[f"posttrain_jobs{{state={state}}}"] for state in ("queued", "launching", "running", "stopping", "paused")} == {
        "queued": 1, "launching": 0, "running": 1, "stopping": 0, "paused": 0}  # fmt: skip
    assert now["posttrain_queue_oldest_seconds"] == pytest.approx(40)
    assert (now["posttrain_devices"], now["posttrain_devices_busy"]) == (1, 1)
    assert now["posttrain_jobs_submitted_total"] == 2
    assert (now["posttrain_queue_wait_seconds_count"], now["posttrain_queue_wait_seconds_sum"]) == (1, pytest.approx(20, abs=0.1))
    assert now["posttrain_launch_seconds_count"] == 1
    mine = f"{{job_uuid={first.job_uuid}}}"
    for name, value in (
        ("loss", 1.5), ("learning_rate", 1e-4), ("step_seconds", 0.25), ("tokens_per_second", 400), ("step", 3), ("total_steps", 9),
        ("eta_seconds", 60), ("heartbeat_age_seconds", pytest.approx(7)),
    ):  # fmt: skip
        assert now[f"posttrain_job_{name}{mine}"] == value
    assert now["posttrain_jobs_ended_total{reason=completed,state=succeeded}"] == 0  # there before the first, for rates
    bench.ends(first, result={"status": "completed", "steps": 9})
    bench.rounds()
    bench.jobs.cancel(waiting.job_uuid)
    bench.rounds()
    bench.ends(bench.job(waiting))
    bench.rounds()
    after = told(bench)
    assert after["posttrain_jobs_ended_total{reason=completed,state=succeeded}"] == 1
    assert after["posttrain_jobs_ended_total{reason=cancelled,state=cancelled}"] == 1
    assert after["posttrain_attempt_seconds_sum{state=succeeded}"] == pytest.approx(40, abs=0.1)
    assert not [name for name in after if "job_uuid" in name]
    assert after["posttrain_devices_busy"] == 0


def test_a_failed_attempt_that_is_retried_counts_as_such(bench):
    job = bench.run(retry={"max_attempts": 2, "on": ["trainer_error"]})
    bench.ends(job, 1, error={"code": "trainer_error", "message": "x", "rank": 0})
    bench.rounds()
    now = told(bench)
    assert now["posttrain_attempts_retried_total"] == 1
    assert sum(value for name, value in now.items() if name.startswith("posttrain_jobs_ended_total")) == 0


def test_what_a_trainer_writes_instead_of_numbers_is_left_out(bench):
    job = bench.run()
    trains(bench, job, STEP | {"loss": "low", "learning_rate": None, "step_time_s": True, "tokens_per_s": 10**400})
    now = told(bench)
    assert not [name for name in now if name.startswith(("posttrain_job_loss{", "posttrain_job_learning_rate{", "posttrain_job_step_seconds{", "posttrain_job_tokens"))]
    assert now[f"posttrain_job_step{{job_uuid={job.job_uuid}}}"] == 3


def test_only_so_many_jobs_have_values_of_their_own(make_bench, monkeypatch):
    monkeypatch.setattr(gauges, "MAX_JOBS", 2)
    bench = make_bench(slots=("cpu:0", "cpu:1", "cpu:2"))
    jobs = [bench.submit() for _ in range(3)]
    bench.rounds(2)
    for job in jobs:
        trains(bench, bench.job(job))
    now = told(bench)
    assert now["posttrain_jobs{state=running}"] == 3
    assert {name for name in now if name.startswith("posttrain_job_loss")} == {f"posttrain_job_loss{{job_uuid={job.job_uuid}}}" for job in jobs[1:]}


def test_no_query_of_a_scrape_walks_over_all_jobs(bench):
    if bench.runtime.store.database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL plans by statistics, so an empty table says nothing about its plans")
    bench.run()
    bench.submit()
    engine, asked = bench.runtime.store.database.engine, []

    def note(connection, cursor, statement, parameters, context, many):
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        told(bench)
    finally:
        event.remove(engine, "before_cursor_execute", note)
    about_jobs = [(statement, parameters) for statement, parameters in asked if "FROM jobs" in statement]
    assert len(about_jobs) >= 4
    with engine.connect() as connection:
        for statement, parameters in about_jobs:
            plan = [str(row[3]) for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert plan[0].startswith("SEARCH jobs USING"), (statement, plan)
            assert "state=?" in plan[0], (statement, plan)
            assert "count" not in statement or "COVERING INDEX" in plan[0], (statement, plan)
        assert "SCAN" in str(connection.execute(text("EXPLAIN QUERY PLAN SELECT count(*) FROM jobs WHERE condemned_at IS NULL")).all())


@pytest.fixture
def http(bench, standing):
    with TestClient(create_app(bench.runtime.settings, build=lambda told: standing(bench.runtime)), base_url="http://127.0.0.1:8484") as client:
        yield client


def test_requests_are_counted_by_template_and_status(bench, http):
    job = bench.submit()
    for path in (job.job_uuid, job.job_uuid, "nobodys"):
        http.get(f"/post_training/jobs/{path}")
    http.get("/nothing/at/all")
    http.request("BREW", "/version")
    http.get("/version", headers={"host": "evil.example"})
    found = samples(http.get("/metrics").text)
    route = "method=GET,route=/post_training/jobs/{job_uuid}"
    assert found[f"posttrain_http_request_seconds_count{{{route},status=200}}"] == 2
    assert found[f"posttrain_http_request_seconds_count{{{route},status=404}}"] == 1
    assert found["posttrain_http_request_seconds_count{method=GET,route=none,status=404}"] == 1
    assert found["posttrain_http_request_seconds_count{method=GET,route=none,status=403}"] == 1
    assert not [name for name in found if job.job_uuid in name or "nobodys" in name or "BREW" in name or "evil" in name]
    assert found["posttrain_http_requests_open"] == 1
    assert found["process_resident_memory_bytes"] > 0
    again = http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert again.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in open_metrics(again.text)} >= {"posttrain_jobs", "posttrain_http_request_seconds"}


def test_a_key_that_sees_its_own_jobs_only_is_told_of_those_only(bench, http):
    texts = {}
    for owner, scope in (("ann", "submit"), ("bob", "read"), ("eve", "admin")):
        key, texts[owner] = make_key(owner, scope, 0.0)
        bench.runtime.store.keys.insert(key)
    body = {"model": "tiny", "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}}
    made = http.post("/post_training/jobs", json=body, headers={"authorization": f"Bearer {texts['ann']}"})
    assert made.status_code == 201
    bench.rounds(2)
    [job] = bench.runtime.store.jobs.live()
    trains(bench, job)

    def ask(owner):
        return samples(http.get("/metrics", headers={"authorization": f"Bearer {texts[owner]}"}).text)

    ann, bob, eve = ask("ann"), ask("bob"), ask("eve")
    assert (ann["posttrain_jobs{state=running}"], bob["posttrain_jobs{state=running}"], eve["posttrain_jobs{state=running}"]) == (1, 0, 1)
    loss = f"posttrain_job_loss{{job_uuid={job.job_uuid}}}"
    assert (ann[loss], bob.get(loss), eve[loss]) == (1.5, None, 1.5)
    assert bob["posttrain_devices_busy"] == 1
    counted = {owner: "posttrain_jobs_submitted_total" in found for owner, found in (("ann", ann), ("bob", bob), ("eve", eve))}
    assert counted == {"ann": False, "bob": False, "eve": True}


def test_rounds_of_loops_are_timed_and_failures_counted():
    meters, good = Meters(), [True]

    def step():
        if not good[0]:
            raise RuntimeError("not now")

    loop = Loop("sweeper", step, Hint(), 1.0, meters.round)
    loop.round()
    good[0] = False
    loop.round()
    found = samples(generate_latest(registry_of(meters)).decode())
    assert found["posttrain_loop_round_seconds_count{loop=sweeper}"] == 2
    assert found["posttrain_loop_failures_total{loop=sweeper}"] == 1


def test_a_blocked_event_loop_shows():
    async def block() -> None:
        task = asyncio.create_task(watch_lag(meters, 0.01))
        while seen["late"] is None:
            await asyncio.sleep(0)
            time.sleep(0.05)
        task.cancel()

    seen: dict[str, float | None] = {"late": None}
    meters = SimpleNamespace(lag=lambda seconds: seen.update(late=seconds))
    asyncio.run(block())
    assert seen["late"] > 0.03


def registry_of(meters):
    registry = CollectorRegistry()
    meters.add_to(registry)
    return registry


WORKERS = """
import os
from prometheus_client import CollectorRegistry, generate_latest
from posttrain_service.work.meters import Meters
for _ in range(2):
    if os.fork() == 0:
        Meters().request("GET", "/version", 200, 0.5)
        os._exit(0)
    os.wait()
registry = CollectorRegistry()
Meters().add_to(registry)
print(generate_latest(registry).decode())
"""


def test_server_processes_that_share_a_folder_add_up(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=True
    )
    found = samples(done.stdout)
    assert found["posttrain_http_request_seconds_count{method=GET,route=/version,status=200}"] == 2
    assert found["posttrain_http_request_seconds_sum{method=GET,route=/version,status=200}"] == 1.0
