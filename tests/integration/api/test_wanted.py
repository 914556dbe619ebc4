"""Which format an Accept header gets, by its weights."""

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from posttrain_service.api.deps import wanted


def chosen(accept):
    headers = [] if accept is None else [(b"accept", accept.encode())]
    return wanted(Request({"type": "http", "headers": headers}), "json", "sse")


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, "json"),
        ("", "json"),
        ("text/event-stream", "sse"),
        ("text/event-stream;q=0.1, application/json", "json"),
        ("text/event-stream; q=0.9, application/json;q=0.5", "sse"),
        ("application/json;q=0, text/event-stream;q=0.001", "sse"),
        ("text/event-stream, */*;q=0.1", "sse"),
        ("text/html, application/json;q=0.000, */*;q=0.2", "json"),
        ("text/event-stream;q=abc", "sse"),
    ],
)
def test_the_highest_weight_wins(accept, form):
    assert chosen(accept) == form


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "application/json;q=0.000"])
def test_nothing_that_is_offered(accept):
    with pytest.raises(HTTPException) as caught:
        chosen(accept)
    assert caught.value.status_code == 406


def test_an_empty_choice_of_metrics_is_refused(http):
    http.post("/post_training/jobs", json={"model": "m", "dataset": "f", "job_uuid": "j"})
    answer = http.get("/post_training/jobs/j/metrics", params={"names": ""})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "names")
