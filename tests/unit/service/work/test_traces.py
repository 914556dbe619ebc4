"""A request, and the queue, launch and attempts of the job that it made, are one trace; and nothing without being asked."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from posttrain_service import compose
from posttrain_service import traces as module
from posttrain_service.app import create_app
from posttrain_service.errors import InvalidSettings
from posttrain_service.traces import Traces, environment, make
from posttrain_service.work.moves import Moves

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = int(CALLER.split("-")[1], 16)
BODY = {"model": "tiny", "dataset": {"rows": [{"prompt": "a", "completion": "b"}]}}


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def traced(make_bench, spans, monkeypatch):
    monkeypatch.setattr(compose, "make_traces", lambda kind: Traces(spans, at_once=True))
    return make_bench()


@pytest.fixture
def http(traced, standing):
    with TestClient(create_app(traced.runtime.settings, build=lambda told: standing(traced.runtime)), base_url="http://127.0.0.1:8484") as client:
        yield client


def finished(spans):
    return {span.name: span for span in spans.get_finished_spans()}


def test_a_request_and_its_job_are_one_trace(traced, http, spans):
    plans = []
    start = traced.backend.start
    traced.backend.start = lambda plan: (plans.append(plan), start(plan))
    made = http.post("/post_training/jobs", json=BODY, headers={"traceparent": CALLER}).json()["job_uuid"]
    traced.clock.advance(5)
    traced.rounds()
    traced.clock.advance(2)
    traced.rounds()
    traced.clock.advance(60)
    job = traced.jobs.get(made).job
    traced.ends(job, result={"status": "completed", "steps": 1})
    traced.rounds()
    found = finished(spans)
    assert list(found) == ["POST /post_training/jobs", "queue", "launch", "attempt"]
    assert {span.context.trace_id for span in found.values()} == {TRACE_ID}
    request = found["POST /post_training/jobs"]
    assert (request.parent.span_id, request.kind.name) == (int(CALLER.split("-")[2], 16), "SERVER")
    assert request.attributes == {"http.request.method": "POST", "http.route": "/post_training/jobs", "http.response.status_code": 201}
    for name, seconds in (("queue", 5), ("launch", 2), ("attempt", 60)):
        span = found[name]
        assert span.parent.span_id == request.context.span_id
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds, abs=0.01)
        assert span.attributes["posttrain.job_uuid"] == made
        assert span.status.is_ok
    assert found["attempt"].attributes["posttrain.reason"] == "completed"
    [plan] = plans
    assert plan.env["TRACEPARENT"] == f"00-{TRACE_ID:032x}-{found['attempt'].context.span_id:016x}-01"
    assert found["queue"].resource.attributes["service.name"] == "posttrain"


def test_a_failed_attempt_is_an_error_and_the_next_one_is_of_the_same_trace(traced, http, spans):
    body = BODY | {"retry": {"max_attempts": 2, "on": ["trainer_error"]}}
    made = http.post("/post_training/jobs", json=body, headers={"traceparent": CALLER}).json()["job_uuid"]
    traced.rounds(2)
    traced.ends(traced.jobs.get(made).job, 1, error={"code": "trainer_error", "message": "no luck", "rank": 0})
    traced.rounds(3)
    traced.jobs.cancel(made)
    traced.ends(traced.jobs.get(made).job)
    traced.rounds()
    assert traced.jobs.get(made).job.state == "cancelled"
    names = [span.name for span in spans.get_finished_spans()]
    assert names[1:] == ["queue", "launch", "attempt", "queue", "launch", "attempt"]
    first, second = (span for span in spans.get_finished_spans() if span.name == "attempt")
    assert (first.status.is_ok, second.status.is_ok) == (False, True)
    assert first.context.span_id != second.context.span_id
    assert {span.context.trace_id for span in spans.get_finished_spans()} == {TRACE_ID}


def test_without_a_caller_s_context_the_request_begins_a_trace_and_scrapes_make_none(traced, http, spans):
    http.get("/metrics")
    http.get("/health/live")
    for sent in ("", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 200):
        answer = http.get("/post_training/jobs/nobodys", headers={"traceparent": sent})
        assert answer.status_code == 404
    found = spans.get_finished_spans()
    assert [span.name for span in found] == ["GET /post_training/jobs/{job_uuid}"] * 4
    assert all(span.parent is None and span.attributes["posttrain.job_uuid"] == "nobodys" for span in found)
    assert len({span.context.trace_id for span in found}) == 4


def test_jobs_of_untraced_requests_have_no_spans(traced, spans):
    job = traced.run()
    traced.ends(job, result={"status": "completed", "steps": 1})
    traced.rounds()
    assert spans.get_finished_spans() == ()
    assert "trace" not in traced.job(job).spec
    assert environment(None, "r", 1) == environment("rubbish", "r", 1) == {}


def test_a_job_whose_rows_are_read_later_keeps_its_trace(traced, http):
    file = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", b'{"prompt": "a", "completion": "b"}\n')}).json()["id"]
    made = http.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file}, headers={"traceparent": CALLER}).json()["id"]
    validator = next(loop for loop in traced.runtime.loops if loop.name == "validator")
    validator.round()
    spec = traced.jobs.get(made).job.spec
    assert "check" not in spec
    assert spec["trace"].startswith(CALLER[:36])


def test_otlp_without_its_packages_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidSettings, match=r"posttrain\[otel\]"):
        make("otlp")
    assert make("off") is None


def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    release = threading.Event()

    class Hangs(InMemorySpanExporter):
        def shutdown(self):
            release.wait(30)

    traces = Traces(Hangs())
    traces.close()
    release.set()


def test_a_service_without_traces_loads_nothing_of_the_sdk():
    code = "import sys, posttrain_service.compose, posttrain_service.app; print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_moves_tell_traces_only_where_there_are_some(bench, caplog):
    assert isinstance(Moves(bench.runtime.services.meters), Moves)
    with caplog.at_level("INFO", logger="posttrain_service"):
        job = bench.run()
    lines = [(record.getMessage(), record.posttrain_fields) for record in caplog.records if record.name == "posttrain_service.work.moves"]
    assert [text for text, _ in lines] == ["queued", "queued -> launching", "launching -> running"]
    assert lines[-1][1]["attempt"] == 1
    assert lines[-1][1]["run"] == job.run_id
