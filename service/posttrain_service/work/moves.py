"""What is told of each move of a job, whoever made it: a log line, the counters, and the spans of its trace."""

from __future__ import annotations

import logging

from posttrain_service.domain.job import Moved
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.logs import fields, log_context
from posttrain_service.traces import TRACE, Traces
from posttrain_service.work.meters import Meters

log = logging.getLogger(__name__)


class Moves:
    """Tells logs, counters and traces.

    Args:
        meters: Counts and times.
        traces: Makes spans; None = nobody asked for them.
    """

    def __init__(self, meters: Meters, traces: Traces | None = None) -> None:
        self._meters = meters
        self._traces = traces

    def told(self, move: Moved) -> None:
        """One move that was made."""
        self._meters.moved(move)
        if self._traces is not None:
            _trace(self._traces, move)
        job = move.job
        with log_context(job=job.job_uuid):
            way = str(job.state) if move.source is None else f"{move.source} -> {job.state}"
            why = "" if job.reason is None else f" ({job.reason})"
            told = fields(source=move.source, state=job.state, reason=job.reason, attempt=job.attempt, run=job.run_id, owner=job.owner)
            log.info("%s%s", way, why, extra=told)


def _trace(traces: Traces, move: Moved) -> None:
    """The span that the move ends: queue, launch, or attempt."""
    job, context = move.job, move.job.spec.get(TRACE)
    if move.source is None or not isinstance(context, str):
        return
    known: dict[str, str | int | float | bool] = {
        "posttrain.job_uuid": job.job_uuid, "posttrain.attempt": job.attempt, "posttrain.state": str(job.state)
    }  # fmt: skip
    if job.reason is not None:
        known["posttrain.reason"] = str(job.reason)
    error = str((job.error or {}).get("message", job.reason)) if JobState.FAILED in (job.state, move.via) else None
    if move.source is JobState.QUEUED:
        traces.span("queue", context, move.since, job.moved_at, known, error=error)
    elif move.source is JobState.LAUNCHING:
        traces.span("launch", context, move.since, job.moved_at, known, error=error)
    elif move.source in (JobState.RUNNING, JobState.STOPPING) and job.state is not JobState.STOPPING and job.started_at is not None:
        known |= {"posttrain.model": job.model, "posttrain.method": job.method, "posttrain.devices": ",".join(job.devices)}
        with traces.told_before(job.run_id, job.attempt):
            traces.span("attempt", context, job.started_at, job.moved_at, known, error=error)
