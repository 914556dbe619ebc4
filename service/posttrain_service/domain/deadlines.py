"""How long a job may stay in a state, and the fields that change when it enters one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain_service.domain.job import Job, Want
from posttrain_service.domain.lifecycle import JobState, is_terminal
from posttrain_service.domain.retention import expires_at
from posttrain_service.settings import Settings

KILL_MARGIN_S = 10.0
"""Time between the end of a stop's grace, when the run kills itself, and the service killing what is left."""
PAUSE_GRACE_SAVES = 3.0
"""A pause saves a checkpoint: its grace is at least this many times as long as the last save took."""


@dataclass(frozen=True)
class Limits:
    """The settings that judgements depend on, in seconds."""

    queue_ttl_s: float
    launch_timeout_s: float
    stop_grace_s: float
    paused_ttl_s: float
    retention_ttl_s: float
    heartbeat_s: Mapping[str, float] = field(default_factory=dict)
    """Longest silence for each phase of the trainer."""
    relaunch_after_s: float = 5.0
    """A launch of which nothing is seen after this time is done again: it may have been lost with the server."""

    @staticmethod
    def of(settings: Settings) -> Limits:
        """The limits that the settings name."""
        return Limits(
            queue_ttl_s=settings.queue_ttl_s,
            launch_timeout_s=settings.launch_timeout_s,
            stop_grace_s=settings.stop_grace_s,
            paused_ttl_s=settings.paused_ttl_s,
            retention_ttl_s=settings.retention_ttl_s,
            heartbeat_s=settings.heartbeat_limits(),
        )


def stop_grace_s(want: Want, limits: Limits, last_save_s: float | None = None) -> float:
    """Seconds that a run has to end after a stop request.

    Args:
        want: cancel ends at once; pause saves first.
        limits: The settings.
        last_save_s: How long the run's last checkpoint took; None = none was saved yet.
    """
    if want == "cancel" or last_save_s is None:
        return limits.stop_grace_s
    return max(limits.stop_grace_s, PAUSE_GRACE_SAVES * last_save_s)


def on_entry(job: Job, to: JobState, now: float, limits: Limits, *, grace_s: float | None = None) -> dict[str, Any]:
    """The fields that change because `job` enters state `to` at `now`; for the `changes` of a move.

    Args:
        job: The job before the move.
        to: The state it enters.
        now: The time of the move.
        limits: The settings.
        grace_s: For stopping: the grace of this stop, if it isn't the usual one.
    """
    if is_terminal(to):
        return {"deadline_at": None, "expires_at": expires_at(job, now, limits.retention_ttl_s)}
    if to is JobState.QUEUED:
        ttl = limits.queue_ttl_s if job.queue_ttl_s is None else job.queue_ttl_s
        return {"deadline_at": now + ttl}
    if to is JobState.LAUNCHING:
        return {
            "attempt": job.attempt + 1,
            "launched_at": now,
            "started_at": None,
            "progress": None,
            "deadline_at": now + limits.launch_timeout_s,
        }
    if to is JobState.RUNNING:
        deadline = None if job.max_duration_s is None else now + job.max_duration_s
        return {"started_at": now, "deadline_at": deadline}
    if to is JobState.STOPPING:
        grace = limits.stop_grace_s if grace_s is None else grace_s
        return {"deadline_at": now + grace + KILL_MARGIN_S}
    return {"deadline_at": now + limits.paused_ttl_s}


def is_overdue(job: Job, now: float) -> bool:
    """Whether the time of the job's present state is over."""
    return job.deadline_at is not None and now >= job.deadline_at
