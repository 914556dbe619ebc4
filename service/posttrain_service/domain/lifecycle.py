"""The states of a job, the moves between them, why it ends, and how the other faces call all that. Pure tables.

The usual way is queued, launching, running, succeeded or failed. A stop goes by stopping to cancelled or paused; resume
leads from paused to queued, and retry (a new attempt) from failed or cancelled: the only way out of a terminal state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from posttrain_service.errors import Conflict


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EndReason(StrEnum):
    """Why a job ended, or is paused. Each reason belongs to one state (`REASON_STATE`)."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    PAUSED_EXPIRED = "paused_expired"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    TRAINER_ERROR = "trainer_error"
    INVALID_ARGUMENTS = "invalid_arguments"
    INVALID_DATA = "invalid_data"
    MODEL_NOT_FOUND = "model_not_found"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    NON_FINITE_LOSS = "non_finite_loss"
    CHECKPOINT_INVALID = "checkpoint_invalid"
    LAUNCH_FAILED = "launch_failed"
    START_TIMEOUT = "start_timeout"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"
    MAX_DURATION = "max_duration"
    QUEUE_TIMEOUT = "queue_timeout"
    LOST = "lost"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
"""States that end a job."""
LIVE = frozenset({JobState.LAUNCHING, JobState.RUNNING, JobState.STOPPING})
"""States in which there may be processes and devices."""

MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.LAUNCHING, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED}),
    JobState.LAUNCHING: frozenset(
        {JobState.RUNNING, JobState.QUEUED, JobState.FAILED, JobState.STOPPING, JobState.SUCCEEDED}
    ),
    JobState.RUNNING: frozenset({JobState.STOPPING, JobState.SUCCEEDED, JobState.FAILED, JobState.PAUSED}),
    JobState.STOPPING: frozenset({JobState.CANCELLED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}
"""State -> states it may go to. From failed and cancelled only `retry` leads out."""

REASON_STATE: dict[EndReason, JobState] = {
    **dict.fromkeys(EndReason, JobState.FAILED),
    EndReason.COMPLETED: JobState.SUCCEEDED,
    EndReason.CANCELLED: JobState.CANCELLED,
    EndReason.PAUSED_EXPIRED: JobState.CANCELLED,
    EndReason.PAUSED: JobState.PAUSED,
    EndReason.PREEMPTED: JobState.PAUSED,
    EndReason.DISK_FULL: JobState.PAUSED,
}
"""Reason -> the state that it leads to."""

Verb = Literal["cancel", "pause", "resume", "retry", "delete"]
Answer = Literal["act", "done", "refuse"]
_S = JobState

_VERBS: dict[Verb, tuple[frozenset[JobState], frozenset[JobState]]] = {
    # verb: (states in which it acts, states in which its effect holds already); refused in all others
    "cancel": (frozenset({_S.QUEUED, _S.LAUNCHING, _S.RUNNING, _S.STOPPING, _S.PAUSED}), frozenset({_S.CANCELLED})),
    "pause": (frozenset({_S.QUEUED, _S.LAUNCHING, _S.RUNNING}), frozenset({_S.PAUSED})),
    "resume": (frozenset({_S.PAUSED}), frozenset({_S.QUEUED, _S.LAUNCHING, _S.RUNNING})),
    "retry": (frozenset({_S.FAILED, _S.CANCELLED}), frozenset({_S.QUEUED, _S.LAUNCHING, _S.RUNNING})),
    "delete": (TERMINAL, frozenset()),
}


def is_terminal(state: JobState) -> bool:
    """Whether the state ends a job."""
    return state in TERMINAL


def is_live(state: JobState) -> bool:
    """Whether there may be processes and devices in this state."""
    return state in LIVE


def check_move(source: JobState, target: JobState) -> None:
    """Refuse a move that the table doesn't have.

    Raises:
        Conflict: There is no such move.
    """
    if target not in MOVES[source]:
        raise Conflict(f"a job that is {source} cannot become {target}", code="illegal_move")


def answer(verb: Verb, state: JobState, want: str | None = None, reason: EndReason | None = None) -> Answer:
    """What a verb means for a job: act on it, done already (or under way), or refuse.

    Args:
        verb: What was asked for.
        state: The job's state.
        want: What the stop under way was asked for, in state stopping.
        reason: Why the service itself stops it, in state stopping.
    """
    acts, done = _VERBS[verb]
    if state is JobState.STOPPING and reason is EndReason.PREEMPTED:
        # It is going to be queued again by itself: that is what a resume wants, and what a pause must prevent.
        return {"cancel": "act", "pause": "act", "resume": "done"}.get(verb, "refuse")  # type: ignore[return-value]
    if state is JobState.STOPPING and verb in ("cancel", "pause"):
        if want == verb:
            return "done"
        return "act" if verb == "cancel" else "refuse"  # a pause becomes a cancel; a cancel is never taken back
    if state in acts:
        return "act"
    return "done" if state in done else "refuse"


def check_verb(
    verb: Verb, job_uuid: str, state: JobState, want: str | None = None, reason: EndReason | None = None
) -> bool:
    """Whether the verb has to act (True) or its effect holds already (False).

    Raises:
        Conflict: The verb contradicts the job's state.
    """
    verdict = answer(verb, state, want, reason)
    if verdict == "refuse":
        raise Conflict(f"cannot {verb} job {job_uuid}: it is {state}; {_HINTS[verb]}", code=f"cannot_{verb}")
    return verdict == "act"


_HINTS: dict[Verb, str] = {
    "cancel": "only a job that has not ended can be cancelled",
    "pause": "only a queued or running job can be paused",
    "resume": "only a paused job can be resumed",
    "retry": "only a failed or cancelled job can be retried",
    "delete": "cancel it first, or wait for its end",
}

_OPENAI = {
    JobState.QUEUED: "queued",
    JobState.LAUNCHING: "queued",
    JobState.RUNNING: "running",
    JobState.STOPPING: "running",
    JobState.PAUSED: "paused",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}
_LLAMA_STACK = {
    JobState.QUEUED: "scheduled",
    JobState.LAUNCHING: "scheduled",
    JobState.RUNNING: "in_progress",
    JobState.STOPPING: "in_progress",
    JobState.PAUSED: "scheduled",
    JobState.SUCCEEDED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}


def openai_status(state: JobState, *, validating: bool = False) -> str:
    """The state as the OpenAI fine-tuning API calls it; `validating`: its files are still being checked."""
    return "validating_files" if validating and state is JobState.QUEUED else _OPENAI[state]


def llama_stack_status(state: JobState) -> str:
    """The state as llama-stack's post-training API calls it."""
    return _LLAMA_STACK[state]
