"""The files that the service reads: metrics.jsonl and events.jsonl, one record a line, each line written at once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

from posttrain_trainer.contract.events import MetricsPoint, Record, RunEvent
from posttrain_trainer.metrics.sink import End

EventType = Literal["phase", "data", "epoch", "validation", "checkpoint", "resume", "tracker", "warning", "ended"]


class LineFile:
    """An append-only file of JSON lines; a reader never sees a line in parts unless the disk filled up in it.

    Args:
        path: Created when missing; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, record: Record) -> None:
        """Write one record, absent values left out, in one system call.

        Raises:
            OSError: The line could not be written, or only in part.
            ValueError: A number is not finite, which JSON cannot hold.
        """
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):
            # Cut the torn line off by ending it, so that the next line stands on its own; then say so.
            os.write(self._fd, b"\n")
            raise OSError(f"only {written} of {len(line)} bytes of a line could be written")

    def close(self) -> None:
        """Close the file; nothing is buffered."""
        os.close(self._fd)


class JsonlSink:
    """The metrics file of the run."""

    name = "jsonl"
    url = None

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, point: MetricsPoint) -> None:
        """Append one point as one line."""
        self._file.append(point)

    def close(self, end: End = "completed") -> None:
        """Close the file."""
        self._file.close()


class EventLog:
    """Events of the run: written to events.jsonl by rank 0, and printed to its log; other ranks only print.

    Args:
        path: The events file; None on ranks that don't write it.
        attempt: Number of the attempt, part of each record.
    """

    def __init__(self, path: Path | None, attempt: int) -> None:
        self._file = LineFile(path) if path is not None else None
        self._attempt = attempt
        self.warnings: list[str] = []

    def tell(self, type_: EventType, message: str, **data: Any) -> None:
        """Record an event of level info."""
        self._append(RunEvent(time=time.time(), attempt=self._attempt, type=type_, message=message, data=data))

    def warn(self, message: str) -> None:
        """Record a warning; the same sentence is told once. All of them go into the run's result as well."""
        if message in self.warnings:
            return
        self.warnings.append(message)
        self._append(RunEvent(time=time.time(), attempt=self._attempt, type="warning", level="warn", message=message))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, event: RunEvent) -> None:
        print(f"[{event.level}] {event.type}: {event.message}", flush=True)
        if self._file is None:
            return
        try:
            self._file.append(event)
        except OSError as error:
            # The log is the only other place; a full disk ends the run where its next checkpoint is written.
            print(f"[error] the event above could not be written to events.jsonl: {error}", file=sys.stderr, flush=True)
