"""Events, logs and metrics of a job: text, CSV, JSON and server-sent events."""

import csv
import io
import json

import pytest

from posttrain_service.client import parse_sse
from posttrain_service.errors import NotFound
from posttrain_service.wire.shapes import LogPiece, MetricsList
from posttrain_service.work.services import StreamItem

JOB = "/post_training/jobs/j"
SSE = {"accept": "text/event-stream"}
END = StreamItem("end", {"status": "succeeded", "reason": "completed"})


def events_of(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    return [(e.event, e.data, e.id) for e in parse_sse(iter([answer.content]))]


@pytest.fixture
def streams(fake, job):
    return fake.services.streams


def test_metrics_stream(http, streams):
    point = {"v": 1, "attempt": 1, "step": 1, "epoch": 0.5, "time": 0.5, "loss": float("nan")}
    streams.items = [
        StreamItem("metric", point, "1:80"),
        StreamItem("heartbeat"),
        StreamItem("metric", {**point, "step": 2, "loss": 1.5}, "1:160"),
        END,
    ]
    answer = http.get(f"{JOB}/metrics", headers=SSE)
    shown = {"attempt": 1, "step": 1, "epoch": 0.5, "time": "1970-01-01T00:00:00.500000Z", "loss": None}
    assert events_of(answer) == [
        ("metric", shown, "1:80"),
        ("metric", {**shown, "step": 2, "loss": 1.5}, "1:160"),
        ("end", END.data, None),
    ]
    assert b"\n: heartbeat\n\n" in answer.content
    assert answer.content.startswith(b": posttrain\nretry: 2000\n\n")
    later = http.get(f"{JOB}/metrics", headers=SSE, params={"after_step": 1, "names": "loss"})
    assert [data["step"] for kind, data, _ in events_of(later) if kind == "metric"] == [2]
    assert streams.asked[-1] == ("metrics", {"after": None, "names": ["loss"]})


def test_event_and_log_streams(http, streams):
    event = {"id": "7", "created_at": 0.0, "type": "note", "level": "info", "message": "m", "data": {}}
    streams.items = [StreamItem("event", event, "7"), END]
    assert events_of(http.get(f"{JOB}/events", headers=SSE))[0] == (
        "event", {**event, "created_at": "1970-01-01T00:00:00.000000Z"}, "7",
    )  # fmt: skip
    # Separators that other line splitters take for line ends stay inside the data.
    text = "50%\r\x1b[2K60%\u2028\x85\nüber\n\n"
    streams.items = [StreamItem("log", {"text": text, "source": "rank-0", "attempt": 1}, "1:9"), END]
    assert events_of(http.get(f"{JOB}/logs", headers=SSE, params={"source": "rank-0", "attempt": 1}))[0][1]["text"] == text
    assert streams.asked[-1] == ("logs", {"after": None, "attempt": 1, "source": "rank-0"})


def test_a_cut_stream_has_no_end_event(http, streams):
    streams.items = []
    assert events_of(http.get(f"{JOB}/events", headers=SSE)) == []


@pytest.mark.parametrize("kind", ["events", "logs", "metrics"])
def test_resuming(http, streams, kind):
    streams.items = [END]
    http.get(f"{JOB}/{kind}", headers=SSE, params={"after": "1:10"})
    assert streams.asked[-1][1]["after"] == "1:10"
    # A browser that reconnects repeats the address of the first request, and says where it was in the header.
    http.get(f"{JOB}/{kind}", headers={**SSE, "Last-Event-ID": "1:99"}, params={"after": "1:10"})
    assert streams.asked[-1][1]["after"] == "1:99"
    bad = http.get(f"{JOB}/{kind}", headers=SSE, params={"after": "x\n"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (422, "after")


@pytest.mark.parametrize(
    ("kind", "query"),
    [
        ("events", {"limit": 3}),
        ("events", {"order": "asc"}),
        ("logs", {"tail": 3}),
        ("logs", {"offset": 3}),
        ("metrics", {"max_points": 3}),
    ],
)
def test_what_a_stream_would_ignore_is_refused(http, streams, kind, query):
    streams.items = [END]
    answer = http.get(f"{JOB}/{kind}", headers=SSE, params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, next(iter(query)))


def test_logs_as_text(http, fake, job):
    fake.services.jobs.log = "".join(f"line {n} ü\n" for n in range(300_000)).encode()
    whole = http.get(f"{JOB}/logs")
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.content == fake.services.jobs.log
    assert {call["limit"] for name, call in fake.services.jobs.calls if name == "logs"} != {None}  # piece by piece
    assert http.get(f"{JOB}/logs", params={"tail": 2}).text == "line 299998 ü\nline 299999 ü\n"
    part = http.get(f"{JOB}/logs", params={"offset": 5, "limit": 10})
    assert (part.content, part.headers["x-log-next-offset"]) == (fake.services.jobs.log[5:15], "15")
    piece = http.get(f"{JOB}/logs", params={"limit": 6}, headers={"accept": "application/json"}).json()
    LogPiece.model_validate(piece)
    assert (piece["text"], piece["next_offset"], piece["sources"]) == ("line 0", 6, {"1": ["torchrun", "rank-0"]})


def test_following_as_text(http, fake, streams, monkeypatch):
    fake.services.jobs.log = b"a\nb\nc\n"
    streams.items = [StreamItem("log", {"text": "d\n", "source": "rank-0", "attempt": 1}, "1:8"), StreamItem("heartbeat"), END]
    assert http.get(f"{JOB}/logs", params={"follow": "true", "tail": 1}).text == "c\nd\n"
    assert streams.asked[-1] == ("logs", {"after": "1:6", "attempt": None, "source": "rank-0"})
    assert http.get(f"{JOB}/logs", params={"follow": "true"}).text == "d\n"
    assert streams.asked[-1][1].get("after") is None

    def none_yet(*args, **kwargs):
        raise NotFound("no attempt has begun")

    monkeypatch.setattr(fake.services.jobs, "logs", none_yet)
    assert http.get(f"{JOB}/logs", params={"follow": "true", "tail": 5}).text == "d\n"
    assert streams.asked[-1][1].get("after") is None


@pytest.mark.parametrize(
    "query",
    [
        {"tail": 0}, {"tail": "x"}, {"offset": -1}, {"limit": 0}, {"limit": 10**9}, {"source": "../../etc/passwd"},
        {"source": "rank-"}, {"attempt": 0}, {"tail": 1, "offset": 0}, {"tail": 1, "limit": 5}, {"follw": 1},
        {"after": "1:2"}, {"follow": "true", "limit": 5},
    ],
)  # fmt: skip
def test_log_queries_that_mean_nothing(http, fake, job, query):
    assert http.get(f"{JOB}/logs", params=query).status_code == 422


def test_metrics_as_json_and_csv(http, fake, job):
    fake.services.jobs.points = [
        {"v": 1, "attempt": 1, "step": 1, "epoch": 0.5, "time": 1.0, "loss": 2.0},
        {"v": 1, "attempt": 1, "step": 2, "epoch": 1.0, "time": 2.0, "loss": float("inf"), "validation_loss": 1.0},
    ]
    page = http.get(f"{JOB}/metrics").json()
    MetricsList.model_validate(page)
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("1", "2", False)
    assert page["data"][1]["loss"] is None
    http.get(f"{JOB}/metrics", params={"names": "loss, epoch", "after_step": 1, "max_points": 10})
    assert fake.services.jobs.calls[-1][1] == {"names": ["loss", "epoch"], "after_step": 1, "max_points": 10}
    table = http.get(f"{JOB}/metrics", headers={"accept": "text/csv"})
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert list(rows[0]) == ["step", "attempt", "epoch", "time", "loss", "validation_loss"]
    assert [row["loss"] for row in rows] == ["2.0", ""]
    assert json.loads(http.get(f"{JOB}/metrics", params={"after_step": 5}).text)["data"] == []
    assert http.get(f"{JOB}/metrics", headers={"accept": "image/png"}).status_code == 406
