"""`Job`: one row as a value, with no behaviour beyond what its fields say. Times are seconds since the epoch, UTC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from posttrain_service.domain.lifecycle import EndReason, JobState

T = TypeVar("T")
Want = Literal["cancel", "pause"]
DevicesWanted = int | Literal["auto"] | tuple[str, ...]
"""A number of devices, "auto", or the ids of particular ones."""


@dataclass(frozen=True)
class RetryPolicy:
    """When a failed attempt is followed by another one without being asked."""

    max_attempts: int = 1
    """Attempts in all, those after a pause not counted; 1 = never retried."""
    on: tuple[str, ...] = ()
    """Reasons that are retried; empty = those whose cause lies outside the job (lost, launch_failed, start_timeout)."""


@dataclass(frozen=True)
class Job:
    """A training job at one moment."""

    run_id: str
    """Server-made UUID: names the run's folder, its processes' marker and its locks."""
    job_uuid: str
    """The id that clients see; equal to run_id unless the client chose its own."""
    owner: str
    """Who may see it; "default" without authentication."""
    state: JobState
    """Where it is in its life."""
    method: str
    """Kind of training, e.g. "sft"."""
    model: str
    """Name or hub id of the base model."""
    spec: dict[str, Any]
    """The resolved request, immutable."""
    body_digest: str
    """SHA-256 over the canonical request body: the same id with another body is refused."""
    created_at: float
    """When it was accepted."""
    name: str | None = None
    """A name for people."""
    reason: EndReason | None = None
    """Why it ended or is paused; while stopping: why the service itself stops it, None when somebody asked for it."""
    error: dict[str, Any] | None = None
    """`{"code", "message", "rank", "log_tail"}` of a failed job, or None."""
    warnings: list[str] = field(default_factory=list)
    """What the person who asked should know."""
    priority: int = 0
    """Higher goes first."""
    metadata: dict[str, str] = field(default_factory=dict)
    """The client's own labels."""
    file_ids: list[str] = field(default_factory=list)
    """Uploaded files that it reads; they can't be deleted before it has ended."""
    moved_at: float = 0.0
    """When it came into its present state."""
    launched_at: float | None = None
    """When this attempt was started (devices taken)."""
    started_at: float | None = None
    """When this attempt's process tree was confirmed."""
    ended_at: float | None = None
    """When it reached a terminal state."""
    expires_at: float | None = None
    """When artifacts and row are removed; None while it lives, or kept for ever."""
    deadline_at: float | None = None
    """When the present state's time is over; None = no limit but the heartbeat's."""
    attempt: int = 0
    """Number of the newest attempt; 0 before the first."""
    want: Want | None = None
    """What a stop was asked for; None when none is."""
    devices_wanted: DevicesWanted = 1
    """What it asked for."""
    devices: list[str] = field(default_factory=list)
    """Devices that it holds now, or held last."""
    progress: dict[str, Any] | None = None
    """The last heartbeat, stored when an attempt ends; while it lives, read the run directory."""
    max_duration_s: float | None = None
    """Longest time that one attempt may run; None = no limit."""
    queue_ttl_s: float | None = None
    """Longest time in the queue; None = the server's default."""
    ttl_s: float | None = None
    """Retention after the end; None = the server's default."""
    keep: bool = False
    """Never removed by retention."""
    retry: RetryPolicy = RetryPolicy()
    """When another attempt follows by itself."""
    retries: int = 0
    """Failures that the policy has retried; pauses and pre-emptions don't count, and a retry by hand begins anew."""
    version: int = 1
    """Raised by every change of the row."""


@dataclass(frozen=True)
class Moved:
    """A job that was stored or moved, for those who count and time such things."""

    job: Job
    """The job since then; `job.moved_at` is when."""
    source: JobState | None
    """The state it came from; None for a new job."""
    since: float
    """When it had come into that state."""
    via: JobState | None = None
    """The state in between, for an end that was retried at once."""


@dataclass(frozen=True)
class NewEvent:
    """An event that has no number yet."""

    type: str
    """Kind, e.g. "queued", "launched", "running", "stopping", "failed", "warning", "checkpoint"."""
    message: str
    """One sentence for people."""
    level: Literal["info", "warn", "error"] = "info"
    """How much it matters."""
    data: dict[str, Any] = field(default_factory=dict)
    """The same as values for programs."""
    created_at: float | None = None
    """When it happened; None = when it is stored."""


@dataclass(frozen=True)
class Event:
    """An event of a job; ids rise within a job and in all."""

    id: int
    job_uuid: str
    created_at: float
    type: str
    level: str
    message: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Page(Generic[T]):
    """One page of a list, newest first."""

    data: list[T]
    has_more: bool
