"""The trainer's own events (events.jsonl) become events of the job, each once.

Each ingested event carries where it ended in its file (`data["at"]` = `<attempt>:<offset>`), so that a server that was
killed anywhere is succeeded by one that goes on right there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from posttrain_service.domain.job import Job, NewEvent
from posttrain_service.store.store import Store
from posttrain_service.work.redact import Redactor
from posttrain_trainer.contract.events import RunEvent
from posttrain_trainer.contract.rundir import RunDir

log = logging.getLogger(__name__)

_CHUNK = 256 * 1024
_BATCH = 200
_LOOK_BACK = 500
MAX_EVENTS = 20_000
"""Most events of one attempt; a trainer that writes more is cut off, with a word."""


class Ingest:
    """Copies new events of live jobs into the store.

    Args:
        store: Where events go.
        redactor: Takes the server's paths out of them.
    """

    def __init__(self, store: Store, redactor: Redactor) -> None:
        self._store = store
        self._redactor = redactor
        self._at: dict[tuple[str, int], int] = {}
        self._count: dict[tuple[str, int], int] = {}

    def pull(self, job: Job, run_dir: RunDir) -> int:
        """Store what the newest attempt has written since; the number of events."""
        key = (job.run_id, job.attempt)
        if key not in self._at:
            self._at[key] = self._known_offset(job)
        path = run_dir.attempt(job.attempt).events
        total = 0
        while lines := _lines(path, self._at[key])[:_BATCH]:
            found = (_event(line, job.attempt, end) for line, end in lines)
            events = [self._redactor.event(event, run_dir) for event in found if event is not None]
            room = MAX_EVENTS - self._count.get(key, 0)
            if events and room > 0 and not self._store.events.append(job.run_id, *events[:room]):
                return total
            if 0 < room < len(events):
                log.warning("attempt %d has written more than %d events; the rest is left out", job.attempt, MAX_EVENTS)
            self._count[key] = self._count.get(key, 0) + len(events)
            self._at[key] = lines[-1][1]
            total += len(events[: max(0, room)])
        return total

    def forget_all_but(self, run_ids: Collection[str]) -> None:
        """Drop what is remembered of runs that aren't live any more."""
        for key in [key for key in self._at if key[0] not in run_ids]:
            del self._at[key]
            self._count.pop(key, None)

    def _known_offset(self, job: Job) -> int:
        """How far an earlier server came: told by the newest ingested event of this attempt."""
        cursor: int | None = None
        prefix = f"{job.attempt}:"
        while True:
            page = self._store.events.page(job.job_uuid, after=cursor, limit=_LOOK_BACK, newest_first=True)
            for event in page.data:
                at = event.data.get("at")
                if isinstance(at, str) and at.startswith(prefix):
                    return int(at.removeprefix(prefix))
                if event.type == "launching":
                    return 0  # this attempt's events come after its launch
            if not page.has_more:
                return 0
            cursor = page.data[-1].id


def _lines(path: Path, offset: int) -> list[tuple[bytes, int]]:
    """Complete lines from `offset`, each with the offset of its end; a line longer than a chunk is taken in pieces."""
    try:
        if os.stat(path, follow_symlinks=False).st_size == offset:  # noqa: PTH116 - for every live run, every second
            return []
        # Opening must neither follow a link nor wait for a pipe's other end, whatever a trainer put there.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            data = os.pread(file.fileno(), _CHUNK, offset)
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s cannot be read: %s", path.name, error.strerror)
        return []
    lines: list[tuple[bytes, int]] = []
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        lines.append((data[start:end], offset + end + 1))
        start = end + 1
    if not lines and len(data) == _CHUNK:
        return [(data, offset + len(data))]
    return lines


def _event(line: bytes, attempt: int, end: int) -> NewEvent | None:
    try:
        record: Any = json.loads(line)
        event = RunEvent.model_validate(record)
    except (ValueError, ValidationError):
        log.warning("a line of events.jsonl that ends at byte %d is no event and is left out", end)
        return None
    data = {**event.data, "attempt": attempt, "at": f"{attempt}:{end}"}
    return NewEvent(event.type, event.message[:2000], event.level, data, created_at=event.time)
