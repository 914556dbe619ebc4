"""A small HTTP client for the native API and the file routes: what the command line and remote adapters use.

Standard use::

    with Client("http://127.0.0.1:8484") as client:
        file_id = client.upload(Path("rows.jsonl"))["id"]
        job = client.create_job({"model": "smollm2-135m-instruct", "dataset": file_id})
        for event in client.stream(job["job_uuid"], "metrics"):
            print(event.data)
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote, urlsplit

import httpx

from posttrain_service.errors import InvalidRequest

StreamKind = Literal["events", "logs", "metrics"]
JSON = dict[str, Any]

_ATTEMPTS = 3
_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0, read=45.0)
"""The server beats every 10 s; a stream that is silent for longer is dead."""


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


class Client:
    """Talks to one server.

    Args:
        base_url: E.g. http://127.0.0.1:8484.
        api_key: Sent as a bearer token.
        transport: Another way to reach the server, for tests.

    Raises:
        InvalidRequest: `base_url` is no address of a server.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        _check_address(base_url)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # trust_env off: a proxy set for the internet must not see requests to the own machine.
        self._http = httpx.Client(
            base_url=base_url.rstrip("/"), headers=headers, timeout=_TIMEOUT, transport=transport, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def create_job(self, request: Mapping[str, Any], *, idempotency_key: str | None = None) -> JSON:
        """Queue a job and return it; a broken connection is tried again without ever making a second job."""
        headers = {"idempotency-key": idempotency_key or str(uuid.uuid4())}
        return self._json("POST", "/post_training/jobs", json=dict(request), headers=headers)

    def plan(self, request: Mapping[str, Any]) -> JSON:
        """Dry run: what `create_job` would start."""
        return self._json("POST", "/post_training/jobs", json=dict(request), params={"dry_run": "true"})

    def job(self, job_uuid: str) -> JSON:
        """One job."""
        return self._json("GET", _job(job_uuid))

    def jobs(self, **query: Any) -> Iterator[JSON]:
        """All jobs that match, newest first; `query` as the list route takes it."""
        return self._pages("/post_training/jobs", "job_uuid", query)

    def cancel(self, job_uuid: str) -> JSON:
        """Stop a job for good."""
        return self._json("POST", f"{_job(job_uuid)}/cancel")

    def pause(self, job_uuid: str) -> JSON:
        """Let a job save and stop."""
        return self._json("POST", f"{_job(job_uuid)}/pause")

    def resume(self, job_uuid: str) -> JSON:
        """Queue a paused job again."""
        return self._json("POST", f"{_job(job_uuid)}/resume")

    def retry(self, job_uuid: str) -> JSON:
        """Start a new attempt of a job that failed or was cancelled."""
        return self._json("POST", f"{_job(job_uuid)}/retry")

    def delete_job(self, job_uuid: str) -> None:
        """Remove an ended job and its artifacts."""
        self._send("DELETE", _job(job_uuid))

    def events(self, job_uuid: str) -> Iterator[JSON]:
        """All events of a job so far, oldest first."""
        return self._pages(f"{_job(job_uuid)}/events", "id", {})

    def logs(self, job_uuid: str, **query: Any) -> str:
        """Text of one log; `query` as the logs route takes it, without follow."""
        return self._send("GET", f"{_job(job_uuid)}/logs", params=query).text

    def log_piece(self, job_uuid: str, **query: Any) -> JSON:
        """The same with where it stands in which log; `<attempt>:<next_offset>` is the cursor that goes on after it."""
        return self._json("GET", f"{_job(job_uuid)}/logs", params=query, headers={"accept": "application/json"})

    def metrics(self, job_uuid: str, **query: Any) -> list[JSON]:
        """Metrics points by step."""
        found: list[JSON] = self._json("GET", f"{_job(job_uuid)}/metrics", params=query)["data"]
        return found

    def checkpoints(self, job_uuid: str) -> list[JSON]:
        """Complete checkpoints by step."""
        return list(self._pages(f"{_job(job_uuid)}/checkpoints", "id", {}))

    def download_checkpoint(self, job_uuid: str, checkpoint_id: str, target: Path) -> Path:
        """Save a checkpoint's tar as `target`, which appears only when it is complete."""
        partial = target.with_name(f".{target.name}.part")
        path = f"{_job(job_uuid)}/checkpoints/{quote(checkpoint_id, safe='')}/archive"
        with self._open("GET", path) as response, partial.open("wb") as file:
            for piece in response.iter_bytes():
                file.write(piece)
        partial.replace(target)
        return target

    def upload(self, path: Path, *, purpose: str = "fine-tune", progress: Callable[[int], None] | None = None) -> JSON:
        """Upload a file; `progress` is told the bytes read so far."""
        with path.open("rb") as file:
            files = {"file": (path.name, _Watched(file.read, progress), "application/octet-stream")}
            return self._json("POST", "/v1/files", data={"purpose": purpose}, files=files, timeout=None)

    def delete_file(self, file_id: str) -> None:
        """Remove an uploaded file."""
        self._send("DELETE", f"/v1/files/{quote(file_id, safe='')}")

    def validate(
        self, dataset: str | JSON, *, model: str | None = None, method: JSON | None = None, train_on: str | None = None
    ) -> JSON:
        """A report on an uploaded file, or on `{"rows": [...]}`, for a method (None = sft), with tokens counted for a model."""
        given = {"model": model, "method": method, "train_on": train_on}
        body = {"dataset": dataset} | {name: value for name, value in given.items() if value is not None}
        return self._json("POST", "/post_training/datasets/validate", json=body)

    def version(self) -> JSON:
        """Versions of the server's parts."""
        return self._json("GET", "/version")

    def is_ready(self) -> bool:
        """Whether the server answers and can take jobs."""
        try:
            return self._http.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def stream(
        self, job_uuid: str, kind: StreamKind, *, after: str | None = None, **query: Any
    ) -> Iterator[ServerEvent]:
        """Events of a job as they happen; the last one is `end`.

        Args:
            job_uuid: The job.
            kind: Which stream.
            after: Cursor to resume from.
            query: As the route takes it.

        Raises:
            ServerGone: The stream ended without `end`. Resume with the id of the last event that had one.
        """
        headers = {"accept": "text/event-stream"} | ({} if after is None else {"last-event-id": after})
        path = f"{_job(job_uuid)}/{kind}"
        with self._open("GET", path, headers=headers, params=query, timeout=_STREAM_TIMEOUT) as response:
            for event in parse_sse(response.iter_bytes()):
                yield event
                if event.event == "end":
                    return
        raise ServerGone("the server ended the stream before the job had ended; the job goes on")

    def _pages(self, path: str, key: str, query: Mapping[str, Any]) -> Iterator[JSON]:
        after: dict[str, str] = {}
        while True:
            page = self._json("GET", path, params={**query, **after})
            yield from page["data"]
            if not page["has_more"] or not page["data"]:
                return
            after = {"after": page["data"][-1][key]}

    def _json(self, method: str, path: str, **how: Any) -> JSON:
        answer: JSON = self._send(method, path, **how).json()
        return answer

    def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        """One request; what is safe to repeat is repeated after a broken connection or a "busy"."""
        repeatable = "files" not in how
        for attempt in range(1, _ATTEMPTS + 1):
            last = attempt == _ATTEMPTS or not repeatable
            try:
                response = self._http.request(method, path, **how)
            except httpx.TransportError as error:
                if last:
                    raise self._gone(error) from error
            else:
                if response.status_code != 503 or last:
                    return _checked(response)
            time.sleep(0.2 * attempt)
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _open(self, method: str, path: str, **how: Any) -> Iterator[httpx.Response]:
        """A response whose body is read while it arrives."""
        try:
            with self._http.stream(method, path, **how) as response:
                if response.status_code >= 400:
                    response.read()
                yield _checked(response)
        except httpx.TransportError as error:
            raise self._gone(error) from error

    def _gone(self, error: httpx.TransportError) -> ServerGone:
        what = "no server answers at" if isinstance(error, httpx.ConnectError) else "the connection broke to"
        return ServerGone(f"{what} {self._http.base_url}: {error or type(error).__name__}")


class _Watched:
    """A readable that tells how much was read."""

    def __init__(self, read: Callable[[int], bytes], progress: Callable[[int], None] | None) -> None:
        self._read, self._progress, self._sum = read, progress, 0

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        data = self._read(size)
        self._sum += len(data)
        if self._progress is not None:
            self._progress(self._sum)
        return data


def parse_sse(pieces: Iterator[bytes]) -> Iterator[ServerEvent]:
    """Server-sent events out of bytes that may be cut anywhere; comments are dropped.

    Lines end with LF, CR or CRLF only: text such as U+2028 inside the data is no line end.
    """
    fields: dict[str, list[str]] = {}
    for line in _lines(pieces):
        if line:
            name, _, value = line.partition(":")
            if name:
                fields.setdefault(name, []).append(value.removeprefix(" "))
        else:
            if "data" in fields:
                event = fields.get("event", ["message"])[-1]
                yield ServerEvent(event, json.loads("\n".join(fields["data"])), fields.get("id", [None])[-1])
            fields = {}


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8")


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code >= 400:
        raise ApiError(response)
    return response


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):  # unbalanced brackets, a port beyond 65535, control characters
        wrong = True
    if wrong:
        raise InvalidRequest(f"{url!r} is no address of a server; they look like http://127.0.0.1:8484", param="server")


def _job(job_uuid: str) -> str:
    """The job's path. An id of dots alone would be a step in the path, whether escaped or not."""
    if not job_uuid.strip(".") or "/" in job_uuid:
        raise InvalidRequest(f"there is no job {job_uuid!r}", code="not_found", param="job_uuid")
    return f"/post_training/jobs/{quote(job_uuid, safe='')}"
