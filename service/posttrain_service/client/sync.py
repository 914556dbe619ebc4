"""The client that blocks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from posttrain_service.client.base import (
    ATTEMPTS,
    CUT,
    JSON,
    PATIENCE_S,
    STREAM_TIMEOUT,
    TIMEOUT,
    ApiError,
    Patience,
    ServerEvent,
    ServerGone,
    StreamKind,
    check_address,
    checked,
    checkpoint_path,
    gone,
    job_path,
    parse_sse,
    signed,
    stream_headers,
    validation,
)
from posttrain_service.client.curves import CURVES, draw


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
        check_address(base_url)
        # trust_env off: a proxy set for the internet must not see requests to the own machine.
        self._http = httpx.Client(
            base_url=base_url.rstrip("/"), headers=signed(api_key), timeout=TIMEOUT, transport=transport, trust_env=False
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
        return self._json("GET", job_path(job_uuid))

    def jobs(self, **query: Any) -> Iterator[JSON]:
        """All jobs that match, newest first; `query` as the list route takes it."""
        return self._pages("/post_training/jobs", "job_uuid", query)

    def cancel(self, job_uuid: str) -> JSON:
        """Stop a job for good."""
        return self._json("POST", f"{job_path(job_uuid)}/cancel")

    def pause(self, job_uuid: str) -> JSON:
        """Let a job save and stop."""
        return self._json("POST", f"{job_path(job_uuid)}/pause")

    def resume(self, job_uuid: str) -> JSON:
        """Queue a paused job again."""
        return self._json("POST", f"{job_path(job_uuid)}/resume")

    def retry(self, job_uuid: str) -> JSON:
        """Start a new attempt of a job that failed or was cancelled."""
        return self._json("POST", f"{job_path(job_uuid)}/retry")

    def delete_job(self, job_uuid: str) -> None:
        """Remove an ended job and its artifacts."""
        self._send("DELETE", job_path(job_uuid))

    def events(self, job_uuid: str) -> Iterator[JSON]:
        """All events of a job so far, oldest first."""
        return self._pages(f"{job_path(job_uuid)}/events", "id", {})

    def logs(self, job_uuid: str, **query: Any) -> str:
        """Text of one log; `query` as the logs route takes it, without follow."""
        return self._send("GET", f"{job_path(job_uuid)}/logs", params=query).text

    def log_piece(self, job_uuid: str, **query: Any) -> JSON:
        """The same with where it stands in which log; `<attempt>:<next_offset>` is the cursor that goes on after it."""
        return self._json("GET", f"{job_path(job_uuid)}/logs", params=query, headers={"accept": "application/json"})

    def metrics(self, job_uuid: str, **query: Any) -> list[JSON]:
        """Metrics points by step."""
        found: list[JSON] = self._json("GET", f"{job_path(job_uuid)}/metrics", params=query)["data"]
        return found

    def plot(self, job_uuid: str, *, names: Sequence[str] = CURVES, axes: Any = None) -> Any:
        """The job's curves by step as a matplotlib figure, for notebooks.

        Args:
            job_uuid: The job.
            names: Which values of the metrics points.
            axes: Axes to draw on; None = new ones.

        Returns:
            The axes.

        Raises:
            InvalidRequest: matplotlib is not installed.
        """
        return draw(self.metrics(job_uuid, names=",".join(names)), names, job_uuid, axes)

    def checkpoints(self, job_uuid: str) -> list[JSON]:
        """Complete checkpoints by step."""
        return list(self._pages(f"{job_path(job_uuid)}/checkpoints", "id", {}))

    def download_checkpoint(self, job_uuid: str, checkpoint_id: str, target: Path) -> Path:
        """Save a checkpoint's tar as `target`, which appears only when it is complete."""
        partial = target.with_name(f".{target.name}.part")
        path = f"{checkpoint_path(job_uuid, checkpoint_id)}/archive"
        with self._open("GET", path) as response, partial.open("wb") as file:
            for piece in response.iter_bytes():
                file.write(piece)
        partial.replace(target)
        return target

    def upload(self, path: Path, *, purpose: str = "fine-tune", progress: Callable[[int], None] | None = None) -> JSON:
        """Upload a file; `progress` is told the bytes read so far."""
        with path.open("rb") as file:
            files = {"file": (path.name, Watched(file.read, progress), "application/octet-stream")}
            return self._json("POST", "/v1/files", data={"purpose": purpose}, files=files, timeout=None)

    def delete_file(self, file_id: str) -> None:
        """Remove an uploaded file."""
        self._send("DELETE", f"/v1/files/{quote(file_id, safe='')}")

    def validate(
        self, dataset: str | JSON, *, model: str | None = None, method: JSON | None = None, train_on: str | None = None
    ) -> JSON:
        """A report on an uploaded file, or on `{"rows": [...]}`, for a method (None = sft), with tokens counted for a model."""
        body = validation(dataset, model, method, train_on)
        return self._json("POST", "/post_training/datasets/validate", json=body)

    def models(self) -> Iterator[JSON]:
        """Base models by name, then what jobs have made, newest first."""
        return self._pages("/v1/models", "id", {})

    def delete_model(self, model: str) -> None:
        """Remove what a job has made: all its checkpoints, or the one that is named."""
        self._send("DELETE", f"/v1/models/{quote(model, safe='')}")

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
        return self._stream(job_uuid, kind, after, query, lambda: None)

    def follow(
        self,
        job_uuid: str,
        kind: StreamKind,
        *,
        after: str | None = None,
        patience_s: float = PATIENCE_S,
        on_gone: Callable[[ServerGone], None] | None = None,
        **query: Any,
    ) -> Iterator[ServerEvent]:
        """`stream` that goes on when the server comes back, right after the last event: nothing twice, nothing left out.

        Args:
            job_uuid: The job.
            kind: Which stream.
            after: Cursor to begin after.
            patience_s: Longest time that the server may be away; 0 = its loss is an error at once.
            on_gone: Told once each time that the server goes away.
            query: As the route takes it.

        Raises:
            ServerGone: It did not come back in time.
        """
        patience = Patience(patience_s, on_gone)
        while True:
            try:
                for event in self._stream(job_uuid, kind, after, query, patience.opened):
                    patience.heard()
                    after = event.id or after
                    yield event
                return
            except (ServerGone, ApiError) as error:
                pause_s = patience.lost(error)
            time.sleep(pause_s)

    def wait(self, job_uuid: str, *, progress: Callable[[JSON], None] | None = None, patience_s: float = PATIENCE_S) -> JSON:
        """The job once it has ended; `progress` is told each metrics point as it is measured.

        Raises:
            ServerGone: The server went away for longer than `patience_s`.
        """
        for event in self.follow(job_uuid, "metrics", patience_s=patience_s):
            if event.event == "metric" and progress is not None:
                progress(event.data)
        return self.job(job_uuid)

    def _stream(
        self, job_uuid: str, kind: StreamKind, after: str | None, query: Mapping[str, Any], opened: Callable[[], None]
    ) -> Iterator[ServerEvent]:
        path = f"{job_path(job_uuid)}/{kind}"
        with self._open("GET", path, headers=stream_headers(after), params=query, timeout=STREAM_TIMEOUT) as response:
            opened()
            for event in parse_sse(response.iter_bytes()):
                yield event
                if event.event == "end":
                    return
        raise ServerGone(CUT)

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
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS or not repeatable
            try:
                response = self._http.request(method, path, **how)
            except httpx.TransportError as error:
                if last:
                    raise gone(self._http.base_url, error) from error
            else:
                if response.status_code != 503 or last:
                    return checked(response)
            time.sleep(0.2 * attempt)
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _open(self, method: str, path: str, **how: Any) -> Iterator[httpx.Response]:
        """A response whose body is read while it arrives."""
        try:
            with self._http.stream(method, path, **how) as response:
                if response.status_code >= 400:
                    response.read()
                yield checked(response)
        except httpx.TransportError as error:
            raise gone(self._http.base_url, error) from error


class Watched:
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
