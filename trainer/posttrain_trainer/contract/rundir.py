"""Every path and file name inside a run directory, and the atomic ways to write them.

Standard library only, since the shim loads it. One layout serves the service (`<storage>/jobs/<run_id>`) and the
library (`ckpt_output_dir`):

    spec.json                      what the service was asked for (service only)
    data/                          rows handed in, tokenised cache (service: data_output_dir)
    attempts/<n>/                  one start of the trainer, n = 1, 2, ...
        arguments.json             {"contract", "train_args", "torch_args"} handed to every rank
        run.json heartbeat.json stop.json result.json error-rank-<r>.json exit.json shim.lock run.lock
        metrics.jsonl events.jsonl
        logs/torchrun.log logs/rank-<r>.log
        torchelastic/              what torchrun notes for itself
    checkpoints/step-000100/       model/ state/ manifest.json (written last)
"""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain_trainer.contract.plainfile import is_plain, names_in, read_plain

ENV_RUN_ID = "POSTTRAIN_JOB_UUID"
"""Environment marker of every process of a job: the run id (a UUID made by the launcher)."""
ENV_ATTEMPT = "POSTTRAIN_ATTEMPT"
ENV_LAUNCHER_LOCK = "POSTTRAIN_LAUNCHER_LOCK"
"""Lock file that the launcher (the shim, or `train_torchrun`) holds; ranks that find nobody holding it end themselves."""

MAX_RECORD_BYTES = 16 * 2**20
"""Longest record of a run that is read."""

# Digits of ASCII only, and no more of them than a number of ranks or attempts has: other names are not ours.
_CHECKPOINT = re.compile(r"step-([0-9]{6,18})")
_ATTEMPT = re.compile(r"[1-9][0-9]{0,8}")
_RANK_LOG = re.compile(r"rank-([0-9]{1,9})\.log")
_RANK_ERROR = re.compile(r"error-rank-([0-9]{1,9})\.json")


@dataclass(frozen=True)
class AttemptDir:
    """The paths of one attempt."""

    path: Path

    @property
    def number(self) -> int:
        """The attempt's number, from 1."""
        return int(self.path.name)

    @property
    def arguments(self) -> Path:
        """What the ranks were started with; written before torchrun starts."""
        return self.path / "arguments.json"

    @property
    def run(self) -> Path:
        """Identity of the running processes; written by the shim after it holds its lock."""
        return self.path / "run.json"

    @property
    def heartbeat(self) -> Path:
        """Phase and progress; replaced by rank 0 whenever there is progress."""
        return self.path / "heartbeat.json"

    @property
    def stop(self) -> Path:
        """Stop request `{"want": "cancel" | "pause"}`; written before anything is signalled."""
        return self.path / "stop.json"

    @property
    def result(self) -> Path:
        """The trainer's own record of its end; written by rank 0."""
        return self.path / "result.json"

    @property
    def exit(self) -> Path:
        """How the process tree ended; written by the shim only, after the last process is gone."""
        return self.path / "exit.json"

    @property
    def shim_lock(self) -> Path:
        """Held exclusively by the shim as long as it lives."""
        return self.path / "shim.lock"

    @property
    def run_lock(self) -> Path:
        """Held shared by every rank as long as it lives."""
        return self.path / "run.lock"

    @property
    def metrics(self) -> Path:
        """One metrics point a line, append only."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One event a line, append only."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of the raw output."""
        return self.path / "logs"

    @property
    def torchrun_log(self) -> Path:
        """Output of the launcher."""
        return self.logs / "torchrun.log"

    def rank_log(self, rank: int) -> Path:
        """Output of one rank."""
        return self.logs / f"rank-{rank}.log"

    def profile(self, rank: int) -> Path:
        """One rank's trace of the profiled steps."""
        return self.path / "profile" / f"rank-{rank}.json"

    def error(self, rank: int) -> Path:
        """The error one rank ended with."""
        return self.path / f"error-rank-{rank}.json"

    def errors(self) -> list[tuple[int, dict[str, Any]]]:
        """The errors of all ranks that left one, lowest rank first."""
        found = []
        for name in names_in(self.path):
            match = _RANK_ERROR.fullmatch(name)
            if match and (data := read_json(self.path / name)) is not None:
                found.append((int(match[1]), data))
        return sorted(found, key=lambda pair: pair[0])

    def log_sources(self) -> list[str]:
        """Names of the logs that exist: "torchrun", "rank-0", ..., ranks in numeric order."""
        names = {name for name in names_in(self.logs) if is_plain(self.logs / name)}
        ranks = sorted(int(m[1]) for name in names if (m := _RANK_LOG.fullmatch(name)))
        return (["torchrun"] if "torchrun.log" in names else []) + [f"rank-{rank}" for rank in ranks]


@dataclass(frozen=True)
class RunDir:
    """The paths of a run: all its attempts share one folder of checkpoints."""

    path: Path

    @property
    def spec(self) -> Path:
        """The validated, immutable request (service only)."""
        return self.path / "spec.json"

    @property
    def data(self) -> Path:
        """Rows handed in and the tokenised cache."""
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def checkpoint(self, checkpoint_id: str) -> Path:
        """Folder of the checkpoint with that id.

        Raises:
            ValueError: `checkpoint_id` is not of the form `step-000100`.
        """
        if not _CHECKPOINT.fullmatch(checkpoint_id):
            raise ValueError(f"{checkpoint_id!r} is not a checkpoint id; they look like step-000100")
        return self.checkpoints / checkpoint_id

    def checkpoint_ids(self) -> list[str]:
        """Ids of the complete checkpoints (those with a manifest), lowest step first."""
        steps = []
        for name in names_in(self.checkpoints):
            match = _CHECKPOINT.fullmatch(name)
            if match and is_plain(self.checkpoints / name / "manifest.json"):
                steps.append((int(match[1]), name))
        return [name for _, name in sorted(steps)]

    def manifest(self, checkpoint_id: str) -> dict[str, Any] | None:
        """The manifest of a checkpoint, or None when it is not complete."""
        return read_json(self.checkpoint(checkpoint_id) / "manifest.json")

    def attempt(self, number: int) -> AttemptDir:
        """The paths of attempt `number`, which need not exist yet."""
        return AttemptDir(self.path / "attempts" / str(number))

    def attempts(self) -> list[AttemptDir]:
        """The attempts that exist, oldest first."""
        numbers = sorted(int(name) for name in names_in(self.path / "attempts") if _ATTEMPT.fullmatch(name))
        return [self.attempt(number) for number in numbers]


def checkpoint_id(step: int) -> str:
    """The id of the checkpoint made after optimizer step `step`."""
    return f"step-{step:06d}"


def write_json(path: Path, data: Any, *, durable: bool = True) -> None:
    """Replace `path` by the JSON text of `data`: a reader sees the old file or the new one, never a part.

    Args:
        path: The file; its folder must exist.
        data: JSON-serialisable; NaN and infinities are refused with ValueError.
        durable: Also survive power loss (fsync of file and folder); off for heartbeats, which are rewritten often.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(data, file, ensure_ascii=False, allow_nan=False)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def read_json(path: Path) -> Any | None:
    """The content of a JSON file; None when the file is not there.

    Raises:
        ValueError: The file is there but not JSON, which atomic writers make impossible: it was altered. Also where it
            is no plain file, longer than MAX_RECORD_BYTES, or nested too deeply.
        OSError: It may not be read.
    """
    try:
        data = read_plain(path, MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
