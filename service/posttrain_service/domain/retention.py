"""What has outlived its time. Pure; removing it is the sweeper's work."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import is_terminal


def expires_at(job: Job, ended_at: float, default_ttl_s: float) -> float | None:
    """When artifacts and row of a job that ended at `ended_at` are to be removed; None = never."""
    if job.keep:
        return None
    return ended_at + (default_ttl_s if job.ttl_s is None else job.ttl_s)


def is_expired(job: Job, now: float) -> bool:
    """Whether a job's artifacts and row are to be removed at `now`."""
    return is_terminal(job.state) and not job.keep and job.expires_at is not None and now >= job.expires_at


def outlived(jobs: Iterable[Job], now: float) -> list[Job]:
    """Those of the jobs that are to be removed at `now`, longest overdue first."""
    return sorted((job for job in jobs if is_expired(job, now)), key=lambda job: (job.expires_at or 0.0, job.run_id))
