"""What both clients share: errors, events of streams, addresses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import httpx

from posttrain_service.errors import InvalidRequest

StreamKind = Literal["events", "logs", "metrics"]
JSON = dict[str, Any]

ATTEMPTS = 3
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=45.0)
"""The server beats every 10 s; a stream that is silent for longer is dead."""
PATIENCE_S = 60.0
"""How long a follower waits for a server that went away."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_STEADY_S = 1.0
"""A stream that stood so long was a working one: its end is a new loss of the server."""
_PASSING = frozenset({502, 503, 504})
"""What a server that stops, or the proxy of one that is gone, answers."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        code: Stable name of the error.
        message: What is wrong and what to do.
        param: Field at fault.
        errors: Every single fault, e.g. bad lines of a data set.
        request_id: The id under which the server's log has it.
    """

    def __init__(self, response: httpx.Response) -> None:
        try:
            error = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            error = {"message": f"the server answered {response.status_code} without saying why"}
        self.status = response.status_code
        self.code = str(error.get("code"))
        self.message = str(error.get("message"))
        self.param: str | None = error.get("param")
        self.errors: list[JSON] = error.get("errors", [])
        self.request_id = response.headers.get("x-request-id")
        super().__init__(self.message)


class ServerGone(Exception):
    """The server cannot be reached, or ended a stream before the job had ended. The job itself goes on."""


@dataclass(frozen=True)
class ServerEvent:
    """One event of a stream."""

    event: str
    """log, metric, event or end."""
    data: JSON
    """Its content."""
    id: str | None
    """Cursor that resumes after it."""


class SseParser:
    """Server-sent events out of bytes that may be cut anywhere; comments are dropped.

    Lines end with LF, CR or CRLF only: text such as U+2028 inside the data is no line end.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, list[str]] = {}

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """The events that are complete with this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8")
            if line:
                name, _, value = line.partition(":")
                if name:
                    self._fields.setdefault(name, []).append(value.removeprefix(" "))
                continue
            fields, self._fields = self._fields, {}
            if "data" in fields:
                event = fields.get("event", ["message"])[-1]
                yield ServerEvent(event, json.loads("\n".join(fields["data"])), fields.get("id", [None])[-1])


def parse_sse(pieces: Iterable[bytes]) -> Iterator[ServerEvent]:
    """The events of a whole stream."""
    parser = SseParser()
    for piece in pieces:
        yield from parser.feed(piece)


def checked(response: httpx.Response) -> httpx.Response:
    """The response, unless it is an error.

    Raises:
        ApiError: It is one.
    """
    if response.status_code >= 400:
        raise ApiError(response)
    return response


def check_address(url: str) -> None:
    """Refuse what is no address of a server.

    Raises:
        InvalidRequest: It isn't.
    """
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):  # unbalanced brackets, a port beyond 65535, control characters
        wrong = True
    if wrong:
        raise InvalidRequest(f"{url!r} is no address of a server; they look like http://127.0.0.1:8484", param="server")


def job_path(job_uuid: str) -> str:
    """The job's path. An id of dots alone would be a step in the path, whether escaped or not."""
    if not job_uuid.strip(".") or "/" in job_uuid:
        raise InvalidRequest(f"there is no job {job_uuid!r}", code="not_found", param="job_uuid")
    return f"/post_training/jobs/{quote(job_uuid, safe='')}"


def checkpoint_path(job_uuid: str, checkpoint_id: str) -> str:
    """The checkpoint's path."""
    return f"{job_path(job_uuid)}/checkpoints/{quote(checkpoint_id, safe='')}"


def stream_headers(after: str | None) -> dict[str, str]:
    """What asks for a stream, and where to resume it."""
    return {"accept": "text/event-stream"} | ({} if after is None else {"last-event-id": after})


def validation(
    dataset: str | JSON, model: str | None, method: JSON | None, train_on: str | None
) -> JSON:
    """The body of a look at a data set."""
    given = {"model": model, "method": method, "train_on": train_on}
    return {"dataset": dataset} | {name: value for name, value in given.items() if value is not None}


def signed(api_key: str | None) -> Mapping[str, str]:
    """The header that carries the key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


class Patience:
    """Whether a follower tries again, and when.

    Args:
        patience_s: Longest time from the loss of the server until it must be back; 0 = it is never tried again.
        on_gone: Told once for each loss.
    """

    def __init__(self, patience_s: float, on_gone: Callable[[ServerGone], None] | None) -> None:
        self._patience_s, self._on_gone = patience_s, on_gone
        self._opened: float | None = None
        self._lost: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def opened(self) -> None:
        """The stream was opened."""
        self._opened = time.monotonic()

    def heard(self) -> None:
        """An event came: what happens next is another loss."""
        self._lost = None

    def lost(self, error: ServerGone | ApiError) -> float:
        """Seconds to wait before the next try.

        Raises:
            ServerGone: Patience is over.
            ApiError: The server refuses, which waiting doesn't change.
        """
        if isinstance(error, ApiError) and error.status not in _PASSING:
            raise error
        now = time.monotonic()
        if self._opened is not None and now - self._opened >= _STEADY_S:
            self._lost = None
        self._opened = None
        if self._lost is None:
            self._lost, self._pause_s = now, _FIRST_PAUSE_S
            if self._on_gone is not None and self._patience_s > 0:
                self._on_gone(ServerGone(str(error)))
        pause_s = self._pause_s
        if now - self._lost + pause_s > self._patience_s:
            raise error if isinstance(error, ServerGone) else ServerGone(str(error)) from error
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s


def gone(base_url: httpx.URL, error: httpx.TransportError) -> ServerGone:
    """What a broken connection means."""
    what = "no server answers at" if isinstance(error, httpx.ConnectError) else "the connection broke to"
    return ServerGone(f"{what} {base_url}: {error or type(error).__name__}")


CUT = "the server ended the stream before the job had ended; the job goes on"
