"""What the faces may use: one frozen dataclass of small services, and the values they hand out.

All methods but the streams block (database, files), so a web face calls them in its threadpool. Errors are
`ServiceError`s. Times are UTC epoch seconds; making JSON of them is the wire's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from posttrain_service.work.meters import Meters

if TYPE_CHECKING:
    from posttrain_service.domain.job import Job
    from posttrain_service.domain.lifecycle import JobState
    from posttrain_service.settings import Settings
    from posttrain_service.traces import Traces
    from posttrain_service.wire.jobs import JobRequest
    from posttrain_service.wire.openai_request import Asked
    from posttrain_service.work.access import Access
    from posttrain_service.work.file_services import DatasetService, FileService, PartService, RegistryService
    from posttrain_service.work.terms import Terms

T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    """One page of a list; `first_id` and `last_id` are the cursors for `before` and `after`."""

    data: Sequence[T]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


@dataclass(frozen=True)
class JobView:
    """A job together with what its run directory and the queue say now."""

    job: Job
    progress: dict[str, Any] | None = None
    """step, total_steps, epoch, percent, eta_s, samples_seen, tokens_seen, tokens_per_s, phase, time."""
    metrics: dict[str, Any] | None = None
    """The newest metrics point."""
    checkpoints: Sequence[dict[str, Any]] = ()
    """Complete checkpoints, lowest step first: id, step, epoch, created_at (epoch seconds), size_bytes, files, metrics, kind, best."""
    queue_position: int | None = None
    """1 = next; None when the job isn't queued."""
    resources: dict[str, Any] | None = None
    """While it runs: devices, num_processes, rss_bytes, cpu_percent."""


@dataclass(frozen=True)
class ModelView:
    """A model that jobs may start from, or that one has made."""

    id: str
    created_at: float
    owned_by: str
    kind: Literal["base", "full", "adapter"]
    trainable: bool
    """Whether a job may start from it."""
    job_uuid: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class EventView:
    """One event of a job. `id` is its cursor."""

    id: str
    created_at: float
    type: str
    level: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LogText:
    """A piece of one log, `offset` to `next_offset` in bytes of a file that now has `size_bytes`."""

    text: str
    attempt: int
    source: str
    offset: int
    next_offset: int
    size_bytes: int


@dataclass(frozen=True)
class StreamItem:
    """One item of a stream.

    `event` is log (data: text, source, attempt), metric (a point), event (id, created_at in epoch seconds, type,
    level, message, data), end (status, reason) or heartbeat (no data; a face sends a comment). `id` is the cursor
    that resumes right after this item; None for heartbeat and end.
    """

    event: str
    data: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


class JobService(Protocol):
    """Jobs. An unknown job_uuid is NotFound everywhere, and so is another owner's. `owner`: None = the caller."""

    def create(
        self,
        request: JobRequest,
        *,
        idempotency_key: str | None = None,
        owner: str | None = None,
        terms: Terms | None = None,
    ) -> tuple[JobView, bool]:
        """Check the request and queue it; False when the same request had already made the job.

        `terms` are what a face demands and tells besides.

        Raises:
            InvalidRequest: A value, a model, a file or rows that cannot be used.
            Conflict: The job_uuid is taken by another request.
        """
        ...

    def accept(
        self, asked: Asked, *, idempotency_key: str | None = None, owner: str | None = None
    ) -> tuple[JobView, bool]:
        """Store the job with its rows still to be checked; they are, before it is launched, and may end it.

        Raises:
            InvalidRequest: A value, a model or a file that cannot be used.
            Conflict: The job_uuid is taken by another request.
        """
        ...

    def states(self) -> list[tuple[str, JobState]]:
        """job_uuid and state of every job, newest first."""
        ...

    def result_files(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """run_id -> ids of the files with the job's results."""
        ...

    def plan(self, request: JobRequest) -> dict[str, Any]:
        """Dry run: what `create` would start, with nothing stored.

        Keys: spec, argv, env, devices, dataset, memory, steps, tokens, warnings.
        """
        ...

    def get(self, job_uuid: str) -> JobView:
        """The job now."""
        ...

    def page(
        self,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        status: Sequence[str] = (),
        owner: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page[JobView]:
        """Newest first; `after` and `before` are job_uuids."""
        ...

    def cancel(self, job_uuid: str) -> JobView:
        """Ask it to stop for good. Repeating is harmless; a job that succeeded or failed is a Conflict."""
        ...

    def pause(self, job_uuid: str) -> JobView:
        """Ask it to save and stop so that it can go on later; a terminal job is a Conflict."""
        ...

    def resume(self, job_uuid: str) -> JobView:
        """Queue a paused job again; a terminal job is a Conflict."""
        ...

    def retry(self, job_uuid: str) -> JobView:
        """Queue a failed or cancelled job again as a new attempt."""
        ...

    def delete(self, job_uuid: str) -> None:
        """Remove a terminal job, artifacts first; any other job is a Conflict."""
        ...

    def events(
        self, job_uuid: str, *, after: str | None = None, limit: int = 100, newest_first: bool = False
    ) -> Page[EventView]:
        """Events after the cursor (before it, when newest first)."""
        ...

    def logs(
        self,
        job_uuid: str,
        *,
        attempt: int | None = None,
        source: str | None = None,
        tail: int | None = None,
        offset: int | None = None,
        limit: int | None = None,
    ) -> LogText:
        """The last `tail` lines, or `limit` bytes from `offset`.

        Without attempt: the newest one. Without source: rank-0, or torchrun while no rank has written anything.
        """
        ...

    def log_sources(self, job_uuid: str) -> dict[int, list[str]]:
        """Names of the logs that exist, by attempt."""
        ...

    def metrics(
        self,
        job_uuid: str,
        *,
        names: Sequence[str] | None = None,
        after_step: int | None = None,
        max_points: int | None = None,
    ) -> list[dict[str, Any]]:
        """Points by step, the newest attempt's for each step."""
        ...

    def checkpoints(self, job_uuid: str) -> list[dict[str, Any]]:
        """Complete checkpoints, lowest step first."""
        ...

    def checkpoint(self, job_uuid: str, checkpoint_id: str) -> dict[str, Any]:
        """One complete checkpoint."""
        ...

    def checkpoint_file(self, job_uuid: str, checkpoint_id: str, path: str) -> tuple[Path, int]:
        """Resolved path and size of one downloadable file (`model/...`, `merged/...`) that the manifest lists."""
        ...

    def checkpoint_files(self, job_uuid: str, checkpoint_id: str) -> list[tuple[str, Path, int]]:
        """Every downloadable file as (path inside the checkpoint, resolved path, size)."""
        ...

    def delete_checkpoint(self, job_uuid: str, checkpoint_id: str) -> None:
        """Remove one checkpoint of an ended job; Conflict for any other, which goes on from its checkpoints."""
        ...


class ModelService(Protocol):
    """Models by name: those under models/, and the results of jobs."""

    def page(self, *, after: str | None = None, limit: int = 100) -> Page[ModelView]:
        """Base models by name, then results of succeeded jobs, newest first."""
        ...

    def get(self, name: str) -> ModelView:
        """One of them, or one checkpoint of a job; NotFound when it isn't there."""
        ...


class StreamService(Protocol):
    """Live streams: async iterators that resume after a cursor and end with the job.

    An unknown job is NotFound when the method is called, before anything is yielded. A stream that returns without
    an `end` item was cut because the server stops.
    """

    def events(self, job_uuid: str, *, after: str | None = None) -> AsyncIterator[StreamItem]:
        """Events from the first, or from after the cursor."""
        ...

    def logs(
        self, job_uuid: str, *, after: str | None = None, attempt: int | None = None, source: str | None = None
    ) -> AsyncIterator[StreamItem]:
        """Text of one source over all attempts, or of one attempt."""
        ...

    def metrics(
        self, job_uuid: str, *, after: str | None = None, names: Sequence[str] | None = None
    ) -> AsyncIterator[StreamItem]:
        """Metrics points in the order they were written."""
        ...

    def close(self) -> None:
        """End all streams soon, and refuse new ones: the server is stopping. Callable from any thread."""
        ...


class HealthService(Protocol):
    """Whether the service can do its work."""

    def live(self) -> dict[str, Any]:
        """{"status": "ok", ...}: the process answers."""
        ...

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Store writable, loops alive, schema current, disk above the reserve; each with what is missing."""
        ...

    def version(self) -> dict[str, Any]:
        """version, contract, python, trainer."""
        ...

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Everything that Prometheus is told, in the form that the Accept header asks for, and its content type.

        A caller who doesn't see everybody's jobs is told of the own ones, of devices and disk, and of nothing that was
        counted over all.
        """
        ...


@dataclass(frozen=True)
class Services:
    """All use cases of one running service, as they are for one caller."""

    jobs: JobService
    files: FileService
    datasets: DatasetService
    models: ModelService
    streams: StreamService
    health: HealthService
    settings: Settings
    parts: PartService
    access: Access
    registry: RegistryService
    meters: Meters = field(default_factory=Meters)
    """Where requests are counted."""
    traces: Traces | None = None
    """Where requests become spans; None = nobody asked for them."""


