"""Times, JSON text, errors, metrics and server-sent events as clients see them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_service.client import ServerEvent, parse_sse
from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.errors import error_body, error_type, field_errors, summary
from posttrain_service.wire.files import expires_after_s, purpose
from posttrain_service.wire.metrics import points_csv
from posttrain_service.wire.text import to_json
from posttrain_service.wire.times import iso, unix
from posttrain_service.wire.views import job_json
from posttrain_service.work.services import JobView


def test_times(monkeypatch):
    assert iso(0) == "1970-01-01T00:00:00.000000Z"
    assert iso(1_700_000_000.25) == "2023-11-14T22:13:20.250000Z"
    assert (iso(None), unix(None), unix(1.9)) == (None, None, 1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=50)
@given(json_values)
def test_json_is_always_json(value):
    encoded = to_json(value).encode("utf-8")

    def never(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(encoded, parse_constant=never)


def test_json_of_odd_values():
    assert to_json({"a": float("nan"), "b": [float("inf"), 1.5], 3: "ü\u2028"}) == '{"a":null,"b":[null,1.5],"3":"ü\u2028"}'
    assert to_json("\ud800") == '"\\ud800"'


def test_errors():
    body = error_body("m", status=404, code="c", param="p")
    assert body == {"error": {"message": "m", "type": "not_found_error", "param": "p", "code": "c"}, "detail": "m"}
    assert [error_type(status) for status in (400, 401, 403, 409, 413, 422, 429, 500, 503)] == [
        "invalid_request_error", "authentication_error", "permission_error", "conflict_error", "invalid_request_error",
        "invalid_request_error", "rate_limit_error", "server_error", "server_error",
    ]  # fmt: skip


def test_field_errors():
    found = field_errors(
        [
            {"type": "missing", "loc": ("body", "model"), "msg": "Field required", "input": {}},
            {"type": "extra_forbidden", "loc": ("body", "x"), "msg": "", "input": 1},
            {"type": "value_error", "loc": ("body",), "msg": "Value error, no", "input": {"secret": 1}},
            {"type": "greater_than", "loc": ("body", "a", 0, "b"), "msg": "too low", "input": "v" * 500},
            {"type": "int_type", "loc": ("query", "q"), "msg": "no int", "input": {"big": 1}},
        ]
    )
    assert [item["loc"] for item in found] == ["x", "", "a.0.b", "q", "model"]
    assert [item["message"] for item in found[:2]] == ["no such field; check the spelling, or leave it out", "no"]
    assert found[4]["message"] == "is required"
    assert len(found[2]["message"]) < 100
    assert found[3]["message"] == "no int"
    assert summary(found) == "x: no such field; check the spelling, or leave it out (and 4 more errors, all in error.errors)"
    assert summary(found[1:2]) == "no"


def test_csv_quotes_what_a_point_holds():
    points = [{"step": 1, "loss": 1.0}, {"step": 2, "note": 'a,"b"\n'}]
    assert points_csv(points) == 'step,loss,note\r\n1,1.0,\r\n2,,"a,""b""\n"\r\n'
    assert points_csv([]) == "step\r\n"


def test_upload_forms():
    assert purpose({"purpose": "fine-tune"}) == "fine-tune"
    assert expires_after_s({}) is None
    assert expires_after_s({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}) == 3600
    for form in ({"expires_after[seconds]": "3600"}, {"expires_after[anchor]": "created_at", "expires_after[seconds]": "-5"}):
        with pytest.raises(InvalidRequest, match="expires_after"):
            expires_after_s(form)


STREAM = 'event: log\ndata: {"text": "a\u2028\x85b"}\nid: 1:5\n\n: heartbeat\n\nretry: 5\n\ndata: 1\ndata: 2\n\r\nevent: end\r\ndata: {}\r\n\r\ndata: "cut'


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_server_sent_events_cut_anywhere(size):
    stream = STREAM.replace("data: 1\ndata: 2\n\r\n", 'data: [1,\ndata: 2]\n\n').encode()
    pieces = iter([stream[n : n + size] for n in range(0, len(stream), size)])
    assert list(parse_sse(pieces)) == [
        ServerEvent("log", {"text": "a\u2028\x85b"}, "1:5"),
        ServerEvent("message", [1, 2], None),
        ServerEvent("end", {}, None),
    ]


def test_pages_of_trackers_are_web_pages_only():
    row = Job(
        run_id="r", job_uuid="r", owner="default", state=JobState.RUNNING, method="sft", model="m", spec={}, body_digest="", created_at=0.0
    )
    good = {"kind": "wandb", "url": "https://t.example/r"}
    told = [good, {"kind": "wandb", "url": "javascript:alert(1)"}, {"kind": 3, "url": "https://t.example"}, {"kind": "mlflow"}, "x"]
    shown = job_json(JobView(row, progress={"step": 1, "trackers": told}))
    assert shown["trackers"] == [good]
    assert shown["progress"] == {"step": 1}
    for nothing in (None, {"step": 1}, {"trackers": "x"}):
        assert job_json(JobView(row, progress=nothing))["trackers"] == []
