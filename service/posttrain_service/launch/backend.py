"""What every way of launching a run offers: plan, start, look, stop, sweep. Values and one protocol, no behaviour.

A backend keeps nothing in memory: each call says which run it means, so any server process can go on after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

StopWant = Literal["cancel", "pause"]


class Liveness(StrEnum):
    """Whether an attempt's supervising process lives. UNKNOWN never ends a job."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Plan:
    """Everything that starting an attempt needs; printable, and made without touching anything."""

    argv: list[str]
    """The launcher's command. No shell reads it, and no value of a request is in it."""
    env: dict[str, str]
    """The whole environment of the job; nothing else is inherited. Values may be secret, names aren't."""
    cwd: Path
    """Working directory: the attempt's folder, so that stray output is found there."""
    attempt_dir: Path
    """The attempt's folder."""
    run_id: str
    """The run's server-made UUID: folder name and process marker."""
    attempt: int
    """Number of the attempt, from 1."""
    grace_s: float
    """Seconds between the request to stop and the end of whatever is left."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Content of the attempt's arguments.json."""


@dataclass(frozen=True)
class Seen:
    """What one look at an attempt found. The records are as their writers left them; None = not there."""

    liveness: Liveness
    """Of the supervising process. Records are read after it, so DEAD without `exit` means that none was written."""
    exit: dict[str, Any] | None = None
    """exit.json: the process tree is gone, and how."""
    started: bool = False
    """run.json is there: the supervising process came up. While it isn't, DEAD may also mean "not yet"."""
    orphans: bool = False
    """Ranks live although their supervising process does not; they must be swept before the attempt counts as over."""
    heartbeat: dict[str, Any] | None = None
    """heartbeat.json."""
    silence_s: float | None = None
    """Seconds since the heartbeat by a clock that nobody sets; None = not known, the heartbeat's own time is all there is."""
    result: dict[str, Any] | None = None
    """result.json; not read while the run lives."""
    error: dict[str, Any] | None = None
    """The error of the rank that failed first (the others mostly fail because of it); not read while the run lives."""
    launched_at: float | None = None
    """When the supervising process came up, UTC epoch seconds."""
    problem: str | None = None
    """What could not be read or believed, for the job's events."""


class LaunchBackend(Protocol):
    """One way to run attempts."""

    def plan(
        self,
        run_id: str,
        attempt: int,
        run_dir: RunDir,
        train_args: FullTrainingArguments,
        torch_args: TorchrunArguments,
        devices: Sequence[str],
    ) -> Plan:
        """What `start` would do; touches nothing.

        Args:
            run_id: The run's UUID.
            attempt: Number of the attempt.
            run_dir: The run's folder, named by run_id.
            train_args: What to train.
            torch_args: How many ranks.
            devices: Slots the run was given, e.g. "gpu:0" or "cpu:0".

        Raises:
            InvalidRequest: An argument that this backend cannot honour.
        """
        ...

    def start(self, plan: Plan) -> None:
        """Start the attempt and return at once; `look` tells when it is up. An attempt runs once, whoever asks how often.

        Raises:
            LaunchFailed: The supervising process could not be started.
        """
        ...

    def look(self, run_dir: RunDir, attempt: int) -> Seen:
        """What the attempt is like now; cheap enough to be asked every second for every live job."""
        ...

    def stop(self, run_dir: RunDir, attempt: int, want: StopWant, *, grace_s: float | None = None) -> None:
        """Ask the attempt to end, and return at once. Repeating is harmless; "cancel" after "pause" counts, not the reverse.

        After it, an attempt that has not started never will.

        Args:
            run_dir: The run's folder.
            attempt: Number of the attempt.
            want: cancel ends at once, pause saves a checkpoint first.
            grace_s: Longer or shorter grace than the plan's.
        """
        ...

    def sweep(self, run_dir: RunDir, attempt: int) -> int:
        """Kill every process of the attempt, its supervising process included.

        Returns:
            How many were killed; afterwards none is left.

        Raises:
            Unavailable: Some don't die (code "still_running"), so the devices aren't free. Ask again.
        """
        ...
