"""Streams of a job as server-sent events, and a log as endless plain text.

The iterators come from `work.streams`, which resume after a cursor, beat when nothing happens, and end with the job
(with an `end` item) or with the server (without one).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi import Request
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import Response, StreamingResponse

from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.metrics import point_json
from posttrain_service.wire.text import to_json
from posttrain_service.wire.times import iso
from posttrain_service.work.services import LogText, StreamItem

RETRY_MS = 2000
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Keep caches and proxies from holding a stream back."""

_MAX_CURSOR = 100


def cursor(request: Request, after: str | None) -> str | None:
    """Where a stream resumes: Last-Event-ID wins, since a client that reconnects repeats the first request's `after`.

    Raises:
        InvalidRequest: It is longer than any cursor, or not printable ASCII.
    """
    sent = request.headers.get("last-event-id") or after or None
    if sent is not None and (len(sent) > _MAX_CURSOR or not sent.isascii() or not sent.isprintable()):
        raise InvalidRequest(
            f"{sent[:_MAX_CURSOR]!r} is not a cursor; send the id of an event of this stream", param="after"
        )
    return sent


def sse_response(
    items: AsyncIterator[StreamItem], *, keep: Callable[[StreamItem], bool] = lambda item: True
) -> Response:
    """The items that `keep` approves of as server-sent events. The first bytes go out at once."""
    return EventSourceResponse(_events(items, keep), headers=HEADERS)


def text_response(first: Iterable[LogText], items: AsyncIterator[StreamItem]) -> Response:
    """The text of a log, and what is written after it until the job ends."""
    return StreamingResponse(_text(first, items), headers=HEADERS, media_type="text/plain; charset=utf-8")


async def _events(items: AsyncIterator[StreamItem], keep: Callable[[StreamItem], bool]) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="posttrain", retry=RETRY_MS)
    async for item in items:
        if item.event == "heartbeat":
            yield format_sse_event(comment="heartbeat")
        elif keep(item):
            yield format_sse_event(event=item.event, data_str=to_json(_shown(item)), id=item.id)


async def _text(first: Iterable[LogText], items: AsyncIterator[StreamItem]) -> AsyncIterator[bytes]:
    for piece in first:
        yield piece.text.encode("utf-8", "replace")
    async for item in items:
        if item.event == "log":
            yield str(item.data["text"]).encode("utf-8", "replace")


def _shown(item: StreamItem) -> dict[str, Any]:
    if item.event == "metric":
        return point_json(item.data)
    if item.event == "event":
        return {**item.data, "created_at": iso(item.data["created_at"])}
    return item.data
