"""How an attempt ended, read from the records it left: the trainer's own word first, then the shim's. Pure.

torchrun's exit code alone proves nothing: ranks that save and exit 0 after SIGTERM still give it a 1. And exit code 0
without a result is no success.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import REASON_STATE, EndReason, JobState

_REASON_TEXT = {
    EndReason.MAX_DURATION: "it ran for its max_duration_s and was stopped",
    EndReason.HEARTBEAT_TIMEOUT: "it made no progress for too long and was stopped",
}


class Seen(Protocol):
    """One look at an attempt; a launch backend's `Seen` is one."""

    @property
    def liveness(self) -> str:
        """alive, dead or unknown: the supervising process."""
        ...

    @property
    def exit(self) -> dict[str, Any] | None:
        """The shim's exit.json."""
        ...

    @property
    def started(self) -> bool:
        """Whether the supervising process came up."""
        ...

    @property
    def orphans(self) -> bool:
        """Whether ranks live although their supervising process is dead."""
        ...

    @property
    def heartbeat(self) -> dict[str, Any] | None:
        """The trainer's heartbeat.json."""
        ...

    @property
    def silence_s(self) -> float | None:
        """Seconds since the heartbeat by a clock that nobody sets; None = not known."""
        ...

    @property
    def result(self) -> dict[str, Any] | None:
        """The trainer's result.json."""
        ...

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of the rank that failed first."""
        ...


@dataclass(frozen=True)
class Outcome:
    """Where an attempt's end leads."""

    state: JobState
    reason: EndReason
    message: str
    """One sentence for people."""
    error: dict[str, Any] | None = None
    """`{"code", "message", "rank", "log_tail"}`; the tail is filled in by whoever can read the logs."""
    warnings: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """Facts for the event."""


def outcome(job: Job, seen: Seen) -> Outcome:
    """What the end of the job's newest attempt means, once no process of it is left.

    A finished training wins over every wish to stop it. A failure that came before a stop was obeyed stays a failure.
    Then come a cancel, the service's own reason for stopping (`job.reason`), and a pause.
    """
    facts = _facts(seen)
    warnings = [str(text) for text in (seen.result or {}).get("warnings") or []]
    if seen.result is not None and seen.result.get("status") == "completed":
        steps = seen.result.get("steps")
        text = f"training is complete after {steps} steps"
        return Outcome(JobState.SUCCEEDED, EndReason.COMPLETED, text, warnings=warnings, data=facts)
    want = wanted(job, seen)
    if seen.error is not None and _failed_by_itself(job, seen, want):
        if seen.error.get("code") != EndReason.DISK_FULL:
            return _failed_by(seen.error, facts, warnings)
        if want != "cancel" and (job.state is not JobState.STOPPING or job.reason in (None, EndReason.PREEMPTED)):
            return _out_of_space(seen.error, facts, warnings)
    if want == "cancel":
        return Outcome(JobState.CANCELLED, EndReason.CANCELLED, "the job was cancelled", warnings=warnings, data=facts)
    if job.state is JobState.STOPPING and job.reason not in (None, EndReason.PREEMPTED):
        assert job.reason is not None
        return _stopped_by_service(job.reason, facts, warnings)
    if want == "pause":
        return _paused(job, seen, facts, warnings)
    return _without_word(seen, facts, warnings)


def wanted(job: Job, seen: Seen) -> str | None:
    """What a stop was asked for: by the job's row, else by what the run says it obeyed."""
    if job.want is not None:
        return job.want
    if job.state is JobState.STOPPING and job.reason is not None:
        return None  # the service's own stop; the run was told "pause" or "cancel" only to make it save or not
    asked = (seen.exit or {}).get("stop_want") or (seen.result or {}).get("want")
    return asked if asked in ("cancel", "pause") else None


def reason_of(code: object) -> EndReason:
    """The reason that a trainer error's code stands for."""
    try:
        reason = EndReason(str(code))
    except ValueError:
        return EndReason.TRAINER_ERROR
    is_trainers = REASON_STATE[reason] is JobState.FAILED or reason is EndReason.DISK_FULL
    return reason if is_trainers else EndReason.TRAINER_ERROR


def _failed_by_itself(job: Job, seen: Seen, want: str | None) -> bool:
    """Whether the error was there before anything was stopped: ranks that are being killed leave errors, too."""
    if want is None and job.state is not JobState.STOPPING:
        return True
    how = (seen.exit or {}).get("reason")
    return how == "exited" or (how == "stopped" and want == "pause")  # the latter: it could not save


def _failed_by(error: dict[str, Any], facts: dict[str, Any], warnings: list[str]) -> Outcome:
    reason = reason_of(error.get("code"))
    message = str(error.get("message") or "the trainer failed and gave no message")
    details = error.get("details")
    data = facts | ({"details": details} if details else {})
    code = str(error.get("code") or reason)
    return _failed(reason, message, data, warnings, code=code, rank=error.get("rank"))


def _out_of_space(error: dict[str, Any], facts: dict[str, Any], warnings: list[str]) -> Outcome:
    """A full disk is the host's trouble and passes: the job waits for space and goes on from its last checkpoint."""
    said = str(error.get("message") or "a write failed for lack of disk space; free some, then resume")
    return Outcome(JobState.PAUSED, EndReason.DISK_FULL, f"the job is paused: {said}", warnings=[*warnings, said], data=facts)


def _failed(
    reason: EndReason,
    message: str,
    data: dict[str, Any],
    warnings: list[str],
    *,
    code: str | None = None,
    rank: int | None = None,
) -> Outcome:
    error = {"code": code or str(reason), "message": message, "rank": rank, "log_tail": None}
    return Outcome(JobState.FAILED, reason, message, error, warnings, data)


def _stopped_by_service(reason: EndReason, facts: dict[str, Any], warnings: list[str]) -> Outcome:
    return _failed(reason, _REASON_TEXT.get(reason, f"it was stopped: {reason}"), facts, warnings)


def _paused(job: Job, seen: Seen, facts: dict[str, Any], warnings: list[str]) -> Outcome:
    preempted = job.reason is EndReason.PREEMPTED
    reason = EndReason.PREEMPTED if preempted else EndReason.PAUSED
    if seen.result is None:
        lost = "the run ended before it could save: on resume it goes on from its last complete checkpoint, if any"
        return Outcome(JobState.PAUSED, reason, "the job is paused", warnings=[*warnings, lost], data=facts)
    at = seen.result.get("checkpoint")
    message = f"the job is paused at {at}" if at else "the job is paused before its first checkpoint"
    if job.want == "pause":
        message += " to make room for a job of higher priority" if preempted else ""
        return Outcome(JobState.PAUSED, reason, message, warnings=warnings, data=facts)
    message += "; it was stopped from outside, by a signal"
    return Outcome(JobState.PAUSED, EndReason.PREEMPTED, message, warnings=warnings, data=facts)


def _without_word(seen: Seen, facts: dict[str, Any], warnings: list[str]) -> Outcome:
    """Neither result nor error, and nobody asked for an end."""
    if seen.exit is None:
        if not seen.started:
            return _failed(EndReason.START_TIMEOUT, "the run did not start in time", facts, warnings)
        text = "all processes of the run vanished without a record: killed, or the host went down"
        return _failed(EndReason.LOST, text, facts, warnings)
    how = seen.exit.get("reason")
    said = seen.exit.get("message")
    if how == "launch_failed":
        return _failed(EndReason.LAUNCH_FAILED, f"torchrun could not be started: {said}", facts, warnings)
    if how == "supervision_failed":
        return _failed(EndReason.LOST, f"the run's supervising process failed: {said}", facts, warnings)
    if how in ("stopped", "killed"):
        text = "the run was stopped from outside, by a signal, before it could say how far it was"
        return _failed(EndReason.LOST, text, facts, warnings)
    number = seen.exit.get("signal")
    if number:
        text = f"torchrun was killed by signal {_signal_name(number)}"
        text += ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
        return _failed(EndReason.LOST, text, facts, warnings)
    code = seen.exit.get("exit_code")
    if code == 0:
        text = "the trainer ended with exit code 0 but left no result, which is no success"
        return _failed(EndReason.TRAINER_ERROR, text, facts, warnings)
    if seen.heartbeat is None:
        text = f"torchrun ended with exit code {code} before any rank could say why; see the torchrun log"
        return _failed(EndReason.LAUNCH_FAILED, text, facts, warnings)
    text = f"the trainer ended with exit code {code} and no rank could say why; see the rank logs"
    return _failed(EndReason.TRAINER_ERROR, text, facts, warnings)


def _facts(seen: Seen) -> dict[str, Any]:
    """What the event of the end tells to programs."""
    ended = seen.exit or {}
    names = ("exit_code", "signal", "leftovers_killed", "unkillable", "stop_want")
    facts = {name: ended[name] for name in names if ended.get(name) is not None}
    facts |= {"exit_reason": ended["reason"]} if "reason" in ended else {}
    result = seen.result or {}
    facts |= {name: result[name] for name in ("steps", "total_steps", "checkpoint") if result.get(name) is not None}
    if "steps" not in facts and seen.heartbeat is not None:
        facts["steps"] = seen.heartbeat.get("step")
    return facts


def _signal_name(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)
