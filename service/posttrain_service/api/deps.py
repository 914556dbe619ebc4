"""What routes ask FastAPI for: the services, a checked Idempotency-Key, query parameters that exist, the wanted format.

All of them are coroutines although they wait for nothing: FastAPI gives plain functions to a thread, which costs more than
what they do.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast

from fastapi import Depends, Header, Request
from starlette.exceptions import HTTPException

from posttrain_service.errors import InvalidRequest
from posttrain_service.logs import add_context
from posttrain_service.work.services import Services

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_QUALITY = re.compile(r"[01](\.[0-9]{0,3})?")
_METADATA = re.compile(r"metadata\[([^\[\]]{1,64})\]")

METADATA = "metadata[key]"

Format = Literal["json", "sse", "csv", "text"]
_MEDIA: dict[str, Format] = {
    "application/json": "json",
    "text/event-stream": "sse",
    "text/csv": "csv",
    "text/plain": "text",
}


async def _services(request: Request) -> Services:
    return cast(Services, request.state.services)  # as the gate found them to be for this caller


async def name_job(request: Request) -> None:
    """Put the job that the path names on every log line of the request."""
    for name in ("job_uuid", "job_id"):
        if name in request.path_params:
            add_context(job=str(request.path_params[name]))


Use = Annotated[Services, Depends(_services)]
"""The use cases of the running service, as they are for the caller."""


async def _idempotency_key(
    idempotency_key: Annotated[
        str | None, Header(description="The same key with the same body gives the same answer, also after a restart.")
    ] = None,
) -> str | None:
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise InvalidRequest(
            "Idempotency-Key must be 1 to 255 visible ASCII characters",
            code="invalid_idempotency_key",
            param="Idempotency-Key",
        )
    return idempotency_key


IdempotencyKey = Annotated[str | None, Depends(_idempotency_key)]


def only(*names: str) -> Any:
    """A dependency that refuses query parameters other than `names`, so that a misspelt one is never ignored.

    `METADATA` in `names` allows `metadata[key]=value`.
    """

    async def check(request: Request) -> None:
        for name in request.query_params:
            if name not in names and not (METADATA in names and _METADATA.fullmatch(name)):
                known = ", ".join(names) if names else "none"
                raise InvalidRequest(
                    f"{name[:100]}: no such query parameter; this route knows {known}", param=name[:100]
                )

    return Depends(check)


async def json_body(request: Request) -> None:
    """Refuse a body that doesn't say that it is JSON: a web page can send any other type without asking first."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPException(415, f"send the body as Content-Type: application/json, not {kind[:100] or 'without one'}")


def metadata_filter(request: Request) -> dict[str, str]:
    """The pairs of `metadata[key]=value` in the query."""
    pairs: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if match := _METADATA.fullmatch(name):
            if pairs.get(match[1], value) != value:
                raise InvalidRequest(f"{name} is given twice with different values", param=name)
            pairs[match[1]] = value
    return pairs


def wanted(request: Request, *offered: Format) -> Format:
    """The format that the request's Accept header rates highest (RFC 9110, 12.5.1); among equals the one named first.

    No header, or an empty one, means the first that is offered.
    """
    best: tuple[float, Format] | None = None
    for part in (request.headers.get("accept", "").strip() or "*/*").split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        found = offered[0] if media in ("*/*", "application/*") else _MEDIA.get(media)
        quality = _quality(parameters)
        if found in offered and quality > (0.0 if best is None else best[0]):
            best = (quality, found)
    if best is not None:
        return best[1]
    raise HTTPException(406, f"Accept asks for none of {', '.join(m for m, f in _MEDIA.items() if f in offered)}")


def _quality(parameters: list[str]) -> float:
    """The weight that `q=` gives; 1 where there is none, or none that can be read."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q" and _QUALITY.fullmatch(value.strip()):
            return float(value)
    return 1.0
