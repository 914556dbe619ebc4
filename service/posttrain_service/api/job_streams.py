"""Routes of a job's events, logs and metrics: as pages, as text or CSV, or as streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import Use, only, wanted
from posttrain_service.api.streams import cursor, sse_response, text_response
from posttrain_service.errors import InvalidRequest, NotFound
from posttrain_service.wire import shapes
from posttrain_service.wire.metrics import point_json, points_csv
from posttrain_service.wire.views import event_json, page_json
from posttrain_service.work.services import LogText, Services

router = APIRouter(prefix="/post_training/jobs/{job_uuid}", tags=["jobs"])

MAX_LOG_BYTES = 4 * 1024 * 1024
_LOG_PIECE_BYTES = 1024 * 1024
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}

After = Annotated[str | None, Query(description="Begin after this cursor (the id of an event).")]


@router.get(
    "/events",
    responses={200: {"model": shapes.EventList, "content": _STREAM}},
    dependencies=[only("after", "limit", "order")],
)
def events(
    request: Request,
    job_uuid: str,
    services: Use,
    after: After = None,
    limit: Annotated[int | None, Query(ge=1, le=1000, description="Most events in a page; 100 unless told.")] = None,
    order: Annotated[str | None, Query(pattern="^(asc|desc)$", description="asc (the default): oldest first.")] = None,
) -> Response:
    """Events as a page, or with Accept: text/event-stream as they happen."""
    if wanted(request, "json", "sse") == "sse":
        _refuse_in_stream(limit=limit, order=order)
        return sse_response(services.streams.events(job_uuid, after=cursor(request, after)))
    page = services.jobs.events(job_uuid, after=after, limit=limit or 100, newest_first=order == "desc")
    return Answer(page_json(page, event_json))


@router.get(
    "/logs",
    responses={200: {"model": shapes.LogPiece, "content": {"text/plain": {"schema": {"type": "string"}}, **_STREAM}}},
    dependencies=[only("attempt", "source", "tail", "offset", "limit", "follow", "after")],
)
def logs(
    request: Request,
    job_uuid: str,
    services: Use,
    attempt: Annotated[int | None, Query(ge=1, description="Attempt; the newest unless told.")] = None,
    source: Annotated[
        str | None,
        Query(pattern=r"^(torchrun|rank-\d{1,6})$", description="torchrun, rank-0, ...; rank-0 unless told."),
    ] = None,
    tail: Annotated[int | None, Query(ge=1, le=100_000, description="Only the last so many lines.")] = None,
    offset: Annotated[int | None, Query(ge=0, description="Begin at this byte.")] = None,
    limit: Annotated[int | None, Query(ge=1, le=MAX_LOG_BYTES, description="Most bytes.")] = None,
    follow: Annotated[bool, Query(description="Go on with what is written until the job ends.")] = False,
    after: After = None,
) -> Response:
    """Output of one log as text; with follow or Accept: text/event-stream as it is written."""
    if tail is not None and (offset is not None or limit is not None):
        raise InvalidRequest("tail excludes offset and limit: it counts lines from the end", param="tail")
    form = wanted(request, "text", "sse", "json")
    if form == "sse":
        _refuse_in_stream(tail=tail, offset=offset, limit=limit)
        return sse_response(
            services.streams.logs(job_uuid, after=cursor(request, after), attempt=attempt, source=source)
        )
    if after is not None:
        raise InvalidRequest("after is the cursor of a stream; a text begins at offset or tail", param="after")
    if follow:
        _refuse_in_stream(limit=limit)
        return _follow(services, job_uuid, attempt, source, tail, offset)
    if form == "json" or tail is not None or limit is not None:
        piece = services.jobs.logs(job_uuid, attempt=attempt, source=source, tail=tail, offset=offset, limit=limit)
        return Answer(_piece_json(services, job_uuid, piece)) if form == "json" else _piece_text(piece)
    first = services.jobs.logs(job_uuid, attempt=attempt, source=source, offset=offset or 0, limit=_LOG_PIECE_BYTES)
    return StreamingResponse(_whole(services, job_uuid, first), headers=_piece_headers(first), media_type=_TEXT)


@router.get(
    "/metrics",
    responses={200: {"model": shapes.MetricsList, "content": {"text/csv": {"schema": {"type": "string"}}, **_STREAM}}},
    dependencies=[only("names", "after_step", "max_points", "after")],
)
def metrics(
    request: Request,
    job_uuid: str,
    services: Use,
    names: Annotated[str | None, Query(max_length=2000, description="Only these values, separated by commas.")] = None,
    after_step: Annotated[int | None, Query(ge=0, description="Only later steps.")] = None,
    max_points: Annotated[
        int | None, Query(ge=2, le=1_000_000, description="Thin out to about so many points, keeping lows and highs.")
    ] = None,
    after: After = None,
) -> Response:
    """Metrics by step as JSON or CSV, or with Accept: text/event-stream as they are measured."""
    form = wanted(request, "json", "csv", "sse")
    chosen = None if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if chosen == []:
        raise InvalidRequest("names is empty; name values such as loss, or leave it out", param="names")
    if form == "sse":
        _refuse_in_stream(max_points=max_points)
        begin = -1 if after_step is None else after_step
        return sse_response(
            services.streams.metrics(job_uuid, after=cursor(request, after), names=chosen),
            keep=lambda item: item.event != "metric" or item.data["step"] > begin,
        )
    if after is not None:
        raise InvalidRequest("after is the cursor of a stream; a list begins at after_step", param="after")
    points = services.jobs.metrics(job_uuid, names=chosen, after_step=after_step, max_points=max_points)
    if form == "csv":
        return Response(points_csv(points), media_type="text/csv; charset=utf-8")
    ends = {"first_id": str(points[0]["step"]), "last_id": str(points[-1]["step"])} if points else {}
    return Answer(
        {"data": [point_json(p) for p in points], "has_more": False, "first_id": None, "last_id": None} | ends
    )


_TEXT = "text/plain; charset=utf-8"


def _refuse_in_stream(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidRequest(f"{name} has no meaning in a stream; leave it out", param=name)


def _follow(
    services: Services, job_uuid: str, attempt: int | None, source: str | None, tail: int | None, offset: int | None
) -> Response:
    """Plain text from the start, from `offset`, or from `tail` lines before the end, going on from there."""
    piece = None
    if tail is not None or offset is not None:
        limit = None if offset is None else _LOG_PIECE_BYTES
        piece = _written(services, job_uuid, attempt=attempt, source=source, tail=tail, offset=offset, limit=limit)
    if piece is None:
        return text_response((), services.streams.logs(job_uuid, attempt=attempt, source=source))
    later = services.streams.logs(
        job_uuid, after=f"{piece.attempt}:{piece.next_offset}", attempt=attempt, source=piece.source
    )
    return text_response((piece,), later)


def _written(services: Services, job_uuid: str, **query: Any) -> LogText | None:
    """What is in the log already; None when no attempt has begun, so that there is nothing to skip."""
    try:
        return services.jobs.logs(job_uuid, **query)
    except NotFound:
        if services.jobs.get(job_uuid).job.attempt == 0:
            return None
        raise


def _whole(services: Services, job_uuid: str, piece: LogText) -> Iterator[bytes]:
    """The log from `piece` to the size it has now, piece by piece."""
    end = piece.size_bytes
    yield piece.text.encode("utf-8", "replace")
    while piece.next_offset < end:
        limit = min(_LOG_PIECE_BYTES, end - piece.next_offset)
        following = services.jobs.logs(
            job_uuid, attempt=piece.attempt, source=piece.source, offset=piece.next_offset, limit=limit
        )
        if following.next_offset <= piece.next_offset:  # it was truncated meanwhile
            return
        piece = following
        yield piece.text.encode("utf-8", "replace")


def _piece_headers(piece: LogText) -> dict[str, str]:
    return {
        "x-log-attempt": str(piece.attempt),
        "x-log-source": piece.source,
        "x-log-offset": str(piece.offset),
        "x-log-size": str(piece.size_bytes),
    }


def _piece_text(piece: LogText) -> Response:
    headers = _piece_headers(piece) | {"x-log-next-offset": str(piece.next_offset)}
    return Response(piece.text.encode("utf-8", "replace"), headers=headers, media_type=_TEXT)


def _piece_json(services: Services, job_uuid: str, piece: LogText) -> dict[str, object]:
    return {
        "text": piece.text,
        "attempt": piece.attempt,
        "source": piece.source,
        "offset": piece.offset,
        "next_offset": piece.next_offset,
        "size_bytes": piece.size_bytes,
        "sources": {str(number): found for number, found in services.jobs.log_sources(job_uuid).items()},
    }
