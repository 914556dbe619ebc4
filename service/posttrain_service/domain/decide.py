"""The supervisor's whole judgement: (job, what is seen of it, now) -> what to do. A pure table; UNKNOWN never ends a job.

Level-triggered: nothing depends on what was decided before, so a supervisor that crashed between deciding and doing is
succeeded by one that decides the same again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from posttrain_service.domain.deadlines import Limits, is_overdue, on_entry
from posttrain_service.domain.job import Job, NewEvent, Want
from posttrain_service.domain.lifecycle import REASON_STATE, EndReason, JobState, is_live
from posttrain_service.domain.outcome import Outcome, Seen, outcome, wanted

RETRIED_BY_DEFAULT = frozenset({EndReason.LOST, EndReason.LAUNCH_FAILED, EndReason.START_TIMEOUT})
"""Reasons outside the job, which another attempt may not meet again."""


class Act(StrEnum):
    """What the supervisor does."""

    WAIT = "wait"
    """Nothing."""
    START = "start"
    """Start the attempt again: nothing is seen of the first try. Harmless if it comes up after all."""
    CONFIRM = "confirm"
    """Move to `to`, which is running."""
    STOP = "stop"
    """Move to `to` if it is given, then ask the run to stop for `stop_want`."""
    SWEEP = "sweep"
    """Kill every process of the attempt; then look again."""
    FINISH = "finish"
    """If `sweep`: make sure that the attempt can't start any more (stop) and that none of it is left (sweep). Then move."""


@dataclass(frozen=True)
class Action:
    """What to do with a job now; the last four fields are a move's."""

    act: Act
    why: str
    """One sentence, for the log."""
    stop_want: Want | None = None
    """With STOP, and with FINISH for the stop before the sweep."""
    sweep: bool = False
    to: JobState | None = None
    via: JobState | None = None
    """The end (or the pause to make room) that is at once followed by the queue: both moves in one transaction."""
    changes: dict[str, Any] = field(default_factory=dict)
    events: tuple[NewEvent, ...] = ()


def decide(job: Job, seen: Seen | None, now: float, limits: Limits) -> Action:
    """What to do with a job.

    Args:
        job: Its row.
        seen: One look at its newest attempt, made after the row was read; None for a job without processes.
        now: The time.
        limits: The settings.
    """
    if not is_live(job.state):
        return _waiting(job, now, limits)
    assert seen is not None, f"job {job.run_id} is {job.state}: look at it first"
    if seen.exit is not None:
        return _end(job, seen, now, limits)
    if seen.liveness == "unknown":
        return Action(Act.WAIT, "whether the run lives cannot be told now")
    if seen.liveness == "dead":
        return _dead(job, seen, now, limits)
    if job.state is JobState.LAUNCHING:
        return _alive_launching(job, seen, now, limits)
    if job.state is JobState.RUNNING:
        return _alive_running(job, seen, now, limits)
    return _alive_stopping(job, now)


def stop_want(job: Job) -> Want:
    """What a stopping job's run is told: what somebody asked for, else save first if there is something to save."""
    if job.want is not None:
        return job.want
    return "pause" if job.reason is EndReason.MAX_DURATION else "cancel"


def is_retried(job: Job, reason: EndReason) -> bool:
    """Whether the job's policy has another attempt follow an end for this reason."""
    reasons = set(job.retry.on) or {str(reason) for reason in RETRIED_BY_DEFAULT}
    return job.retries + 1 < job.retry.max_attempts and str(reason) in reasons


def _waiting(job: Job, now: float, limits: Limits) -> Action:
    """Queued and paused: only time ends them."""
    if not is_overdue(job, now):
        return Action(Act.WAIT, "nothing to do")
    if job.state is JobState.QUEUED:
        text = "the job waited in the queue for longer than its limit"
        error = {"code": str(EndReason.QUEUE_TIMEOUT), "message": text, "rank": None, "log_tail": None}
        return _finish(job, Outcome(JobState.FAILED, EndReason.QUEUE_TIMEOUT, text, error), None, now, limits)
    if job.state is JobState.PAUSED:
        text = "the job was paused for longer than the server's limit; its checkpoints stay as long as the job does"
        return _finish(job, Outcome(JobState.CANCELLED, EndReason.PAUSED_EXPIRED, text), None, now, limits)
    return Action(Act.WAIT, "the job has ended")


def _dead(job: Job, seen: Seen, now: float, limits: Limits) -> Action:
    """The supervising process isn't there, and left no exit.json."""
    if seen.orphans:
        return Action(Act.SWEEP, "ranks are left over although their supervising process is dead")
    if job.state is JobState.LAUNCHING and not seen.started and not is_overdue(job, now):
        if now - (job.launched_at or job.moved_at) >= limits.relaunch_after_s:
            return Action(Act.START, "nothing is seen of the launch; it is done again")
        return Action(Act.WAIT, "the run is starting")
    return _end(job, seen, now, limits)


def _alive_launching(job: Job, seen: Seen, now: float, limits: Limits) -> Action:
    if seen.started:
        return _confirm(job, now, limits)
    if is_overdue(job, now):
        text = f"the run did not come up within {limits.launch_timeout_s:g} s"
        return _finish(job, _failure(EndReason.START_TIMEOUT, text), seen, now, limits)
    return Action(Act.WAIT, "the run is starting")


def _alive_running(job: Job, seen: Seen, now: float, limits: Limits) -> Action:
    if is_overdue(job, now):
        text = f"the job has run for its {job.max_duration_s:g} s; it saves a checkpoint and stops"
        return _stop(job, EndReason.MAX_DURATION, "pause", text, now, limits)
    beat = seen.heartbeat or {}
    phase = str(beat.get("phase", "import"))
    limit = limits.heartbeat_s.get(phase, max(limits.heartbeat_s.values(), default=float("inf")))
    # A monotonic clock where both sides have one: a clock that is set, or a host that slept, is no silence of the run.
    last = max(_number(beat.get("time")), job.started_at or job.moved_at)
    silence_s = now - last if seen.silence_s is None else seen.silence_s
    if silence_s > limit:
        text = f"no progress for {silence_s:.0f} s in phase {phase}, where {limit:g} s are allowed; the job is stopped"
        return _stop(job, EndReason.HEARTBEAT_TIMEOUT, "cancel", text, now, limits)
    return Action(Act.WAIT, "the run makes progress")


def _alive_stopping(job: Job, now: float) -> Action:
    if is_overdue(job, now):
        return Action(Act.SWEEP, "the run did not end within its grace")
    return Action(Act.STOP, "the run is asked to stop", stop_want=stop_want(job))


def _end(job: Job, seen: Seen, now: float, limits: Limits) -> Action:
    """No supervising process: read the records."""
    if job.state is JobState.RUNNING and job.want is None and wanted(job, seen) == "cancel" and not _completed(seen):
        # Somebody put a stop request there by hand; the way to cancelled leads through stopping.
        text = "the run was told to cancel"
        return _move(Act.STOP, job, JobState.STOPPING, {"want": "cancel"}, text, now, limits, "cancel")
    end = outcome(job, seen)
    if job.state is JobState.LAUNCHING and end.state not in (JobState.SUCCEEDED, JobState.FAILED):
        return _confirm(job, now, limits)  # it did run, however shortly; the next look ends it
    return _finish(job, end, seen, now, limits)


def _completed(seen: Seen) -> bool:
    return seen.result is not None and seen.result.get("status") == "completed"


def _confirm(job: Job, now: float, limits: Limits) -> Action:
    return _move(Act.CONFIRM, job, JobState.RUNNING, {}, f"attempt {job.attempt} is running", now, limits)


def _stop(job: Job, reason: EndReason, want: Want, text: str, now: float, limits: Limits) -> Action:
    return _move(Act.STOP, job, JobState.STOPPING, {"reason": reason}, text, now, limits, want, "warn")


def _move(
    act: Act,
    job: Job,
    to: JobState,
    changes: dict[str, Any],
    text: str,
    now: float,
    limits: Limits,
    want: Want | None = None,
    level: Literal["info", "warn", "error"] = "info",
) -> Action:
    event = NewEvent(str(to), text, level, {"attempt": job.attempt})
    return Action(act, text, want, to=to, changes=on_entry(job, to, now, limits) | changes, events=(event,))


def _failure(reason: EndReason, text: str) -> Outcome:
    assert REASON_STATE[reason] is JobState.FAILED
    return Outcome(JobState.FAILED, reason, text, {"code": str(reason), "message": text, "rank": None, "log_tail": None})


def _finish(job: Job, end: Outcome, seen: Seen | None, now: float, limits: Limits) -> Action:
    ended = NewEvent(
        str(end.state),
        end.message,
        "error" if end.state is JobState.FAILED else "info",
        {"attempt": job.attempt, "reason": str(end.reason), **end.data},
    )
    new = [text for text in dict.fromkeys(end.warnings) if text not in job.warnings]
    events = [NewEvent("warning", text, "warn", {"attempt": job.attempt}) for text in new] + [ended]
    changes: dict[str, Any] = {"warnings": [*job.warnings, *new]}
    if seen is not None and seen.heartbeat is not None:
        changes["progress"] = seen.heartbeat
    to, via = end.state, None
    if end.state is JobState.FAILED and is_retried(job, end.reason):
        to, via = JobState.QUEUED, JobState.FAILED
        changes["retries"] = job.retries + 1
        nth = f"retry {job.retries + 1} of {job.retry.max_attempts - 1}"
        text = f"attempt {job.attempt} failed ({end.reason}); {nth}: the job is queued again"
        events.append(NewEvent("queued", text, "warn", {"attempt": job.attempt, "reason": str(end.reason)}))
    elif end.state is JobState.PAUSED and job.reason is EndReason.PREEMPTED and end.reason is not EndReason.DISK_FULL:
        to, via = JobState.QUEUED, JobState.PAUSED
        text = "the job goes on by itself as soon as devices are free again: it is queued"
        events.append(NewEvent("queued", text, data={"attempt": job.attempt, "reason": str(end.reason)}))
    else:
        changes |= {"reason": end.reason, "error": end.error}
    want = stop_want(job) if job.state is JobState.STOPPING else "cancel"
    return Action(
        Act.FINISH, end.message, want, is_live(job.state), to, via,
        on_entry(job, to, now, limits) | changes, tuple(events),
    )  # fmt: skip


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
