"""The sign of progress that the service watches: heartbeat.json, written by rank 0 whenever there is some.

Loads no torch: the first beat comes before the slow imports.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from posttrain_trainer.contract.events import Heartbeat, Phase, Tracker
from posttrain_trainer.contract.rundir import write_json

_LEAST_PAUSE_S = 0.1


class Heart:
    """Keeps the newest progress and writes it.

    A change of phase is written at once; beats within one phase at most ten times a second, so that a model of a
    few thousand parameters does not spend its time writing files.

    Args:
        path: heartbeat.json; None on ranks that don't write it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written_at = 0.0
        self.now = Heartbeat(time=time.time(), phase="import")

    def beat(self, phase: Phase, **progress: float | int | None) -> None:
        """Note progress.

        Args:
            phase: What is being done.
            progress: New values of Heartbeat's other fields; the rest stay.
        """
        urgent = phase != self.now.phase or self._written_at == 0.0
        self.now = self.now.model_copy(update={**progress, "phase": phase, "time": time.time(), "monotonic": time.monotonic()})
        if urgent or time.monotonic() - self._written_at >= _LEAST_PAUSE_S:
            self.flush()

    def show(self, trackers: list[Tracker]) -> None:
        """Name the pages that show this attempt, from the next beat on."""
        self.now = self.now.model_copy(update={"trackers": trackers})

    def flush(self) -> None:
        """Write the newest progress now."""
        self._written_at = time.monotonic()
        if self._path is None:
            return
        try:
            write_json(self._path, self.now.model_dump(mode="json"), durable=False)
        except OSError as error:
            # A full disk ends the run where it matters, at the next checkpoint; until then training goes on.
            print(f"[error] heartbeat.json could not be written: {error}", file=sys.stderr, flush=True)
