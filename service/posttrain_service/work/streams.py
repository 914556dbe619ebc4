"""Events, logs and metrics of a job as async iterators that resume from a cursor and end when the job does.

A cursor of logs and metrics is `<attempt>:<offset>`, the byte after what was sent; of events it is the event's number.
Whether the job has ended is always asked before the last look at a file, so nothing that was written is missed.
"""

from __future__ import annotations

import asyncio
import copy
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posttrain_service.domain.job import Event, Job
from posttrain_service.domain.lifecycle import is_live, is_terminal
from posttrain_service.errors import InvalidRequest, NotFound, Unavailable
from posttrain_service.runs.lines import Lines
from posttrain_service.runs.read import MAX_POINT_BYTES, parse_point
from posttrain_service.runs.tail import Chunk, follow, line_start
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work.services import StreamItem
from posttrain_service.work.shared import Shared
from posttrain_trainer.contract.rundir import AttemptDir, RunDir

HEARTBEAT_S = 10.0
POLL_S = 0.25
_EVENTS_PAGE = 500
_CURSOR = re.compile(r"(\d{1,9}):(\d{1,15})")
_SOURCE = re.compile(r"torchrun|rank-\d{1,6}")
_NAMED_ALWAYS = frozenset({"step", "attempt", "epoch", "time"})

Pause = Callable[[float], Awaitable[object]]
PathOf = Callable[[AttemptDir, bool], Path | None]
"""The file of an attempt to read; None while it isn't decided. The flag says that the attempt is over."""


class Closed(Exception):
    """The server stops."""


class Streams:
    """See `StreamService`.

    Args:
        settings: Of the service.
        store: Where jobs and events are.
        sleep: Waits between two looks.
    """

    def __init__(self, settings: Settings, store: Store, *, sleep: Pause = asyncio.sleep) -> None:
        self._settings = settings
        self._store = store
        self._jobs = Shared(store.jobs.get_run, POLL_S)
        self._sleep = sleep
        self._closing = threading.Event()

    def seen_by(self, store: Store) -> Streams:
        """The same over another view of the store; `close` ends the streams of both."""
        view = copy.copy(self)
        view._store = store
        view._jobs = Shared(store.jobs.get_run, POLL_S)
        return view

    def close(self) -> None:
        """See `StreamService.close`."""
        self._closing.set()

    def events(self, job_uuid: str, *, after: str | None = None) -> AsyncIterator[StreamItem]:
        """See `StreamService.events`."""
        job = self._job(job_uuid)
        return self._until_closed(self._events(job, event_cursor(after)))

    def logs(
        self, job_uuid: str, *, after: str | None = None, attempt: int | None = None, source: str | None = None
    ) -> AsyncIterator[StreamItem]:
        """See `StreamService.logs`."""
        job = self._job(job_uuid)
        check_source(source)
        return self._until_closed(self._logs(job, cursor(after), attempt, source))

    def metrics(
        self, job_uuid: str, *, after: str | None = None, names: Sequence[str] | None = None
    ) -> AsyncIterator[StreamItem]:
        """See `StreamService.metrics`."""
        job = self._job(job_uuid)
        return self._until_closed(self._metrics(job, cursor(after), names))

    def _job(self, job_uuid: str) -> Job:
        if self._closing.is_set():
            raise Unavailable("the server is stopping")
        job = self._store.jobs.get(job_uuid)
        if job is None:
            raise NotFound(f"there is no job {job_uuid[:140]!r}", code="job_not_found", param="job_uuid")
        return job

    async def _until_closed(self, items: AsyncIterator[StreamItem]) -> AsyncIterator[StreamItem]:
        try:
            async for item in items:
                yield item
                if self._closing.is_set():
                    return
        except Closed:
            return

    async def _events(self, job: Job, after: int | None) -> AsyncIterator[StreamItem]:
        silent_s = 0.0
        while True:
            now = await self._now(job)
            page = await asyncio.to_thread(self._store.events.page, job.job_uuid, after=after, limit=_EVENTS_PAGE)
            for event in page.data:
                yield StreamItem("event", event_data(event), str(event.id))
                after, silent_s = event.id, 0.0
            if not page.data and (now is None or is_terminal(now.state)):
                yield _end(now)
                return
            if not page.data:
                await self._pause(POLL_S)
                silent_s += POLL_S
                if silent_s >= HEARTBEAT_S:
                    silent_s = 0.0
                    yield StreamItem("heartbeat")

    async def _logs(
        self, job: Job, at: tuple[int, int], only: int | None, source: str | None
    ) -> AsyncIterator[StreamItem]:
        async for attempt, chunk in self._follow(job, at, only, lambda paths, over: log_path(paths, source, over)):
            if not chunk.data:
                yield StreamItem("heartbeat")
                continue
            name = source or default_source(self._attempt(job, attempt)) or "rank-0"
            data = {"text": chunk.text, "source": name, "attempt": attempt}
            yield StreamItem("log", data, f"{attempt}:{chunk.end}")
        yield _end(await self._now(job))

    async def _metrics(
        self, job: Job, at: tuple[int, int], names: Sequence[str] | None
    ) -> AsyncIterator[StreamItem]:
        number, lines = 0, Lines(MAX_POINT_BYTES)
        # A record is sent whole or not at all, so a cursor in the middle of one goes back to its beginning.
        at = at[0], await asyncio.to_thread(line_start, self._attempt(job, at[0]).metrics, at[1]) if at[1] else 0
        async for attempt, chunk in self._follow(job, at, None, lambda paths, over: paths.metrics):
            if attempt != number or chunk.restarted:
                number = attempt
                lines.restart()
            if not chunk.data:
                yield StreamItem("heartbeat")
                continue
            for line, end in lines.feed(chunk.data, chunk.start):
                point = named(parse_point(line, attempt), names)
                if point is not None:
                    yield StreamItem("metric", point, f"{attempt}:{end}")
        yield _end(await self._now(job))

    async def _follow(
        self, job: Job, at: tuple[int, int], only: int | None, path_of: PathOf
    ) -> AsyncIterator[tuple[int, Chunk]]:
        """One file of each attempt, one attempt after the other, until the job has ended; empty chunks are heartbeats."""
        number, offset = at
        if only is not None and only != number:
            number, offset = only, 0
        while True:
            async for path in self._wait_for(job, number, path_of):
                if path is None:
                    yield number, Chunk(b"", offset, offset)
                    continue
                ended = partial(self._is_over, job, number)
                async for chunk in follow(
                    path, offset, ended=ended, idle_s=HEARTBEAT_S, poll_s=POLL_S, pause=self._pause
                ):
                    yield number, chunk
            now = await self._now(job)
            if only is not None or now is None or (is_terminal(now.state) and now.attempt <= number):
                return
            number, offset = number + 1, 0

    async def _wait_for(self, job: Job, number: int, path_of: PathOf) -> AsyncIterator[Path | None]:
        """The path once it is decided, after a None for each silent span; nothing when there will be no such attempt."""
        silent_s = 0.0
        while True:
            now = await self._now(job)
            if now is None or (is_terminal(now.state) and now.attempt < number):
                return
            if now.attempt >= number:
                over = now.attempt > number or not is_live(now.state)
                path = await asyncio.to_thread(path_of, self._attempt(job, number), over)
                if path is not None:
                    yield path
                    return
                if over:
                    return
            await self._pause(POLL_S)
            silent_s += POLL_S
            if silent_s >= HEARTBEAT_S:
                silent_s = 0.0
                yield None

    async def _is_over(self, job: Job, attempt: int) -> bool:
        now = await self._now(job)
        return now is None or now.attempt > attempt or not is_live(now.state)

    async def _now(self, job: Job) -> Job | None:
        return await self._jobs.get(job.run_id)

    async def _pause(self, seconds: float) -> None:
        if self._closing.is_set():
            raise Closed
        await self._sleep(seconds)
        if self._closing.is_set():
            raise Closed

    def _attempt(self, job: Job, number: int) -> AttemptDir:
        return RunDir(self._settings.jobs_dir / job.run_id).attempt(number)


def cursor(text: str | None) -> tuple[int, int]:
    """The attempt and offset that a cursor of logs or metrics names; the beginning for None.

    Raises:
        InvalidRequest: It is no such cursor.
    """
    if text is None or text == "":
        return 1, 0
    match = _CURSOR.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise InvalidRequest(f"{text[:80]!r} is no cursor of this stream; they look like 1:4096", code="invalid_cursor", param="after")
    return int(match[1]), int(match[2])


def event_cursor(text: str | None) -> int | None:
    """The event number that a cursor names.

    Raises:
        InvalidRequest: It is no number.
    """
    if text is None or text == "":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest(f"{text[:80]!r} is no event's id; they are numbers", code="invalid_cursor", param="after")
    return int(text)


def check_source(source: str | None) -> None:
    """Refuse what is no log's name.

    Raises:
        InvalidRequest: It is neither torchrun nor rank-<n>.
    """
    if source is not None and _SOURCE.fullmatch(source) is None:
        raise InvalidRequest(f"source is {source[:80]!r}; logs are named torchrun, rank-0, rank-1, ...", param="source")


def log_path(paths: AttemptDir, source: str | None, over: bool) -> Path | None:
    """The log to read; None while the first rank may yet write one and nobody asked for another."""
    if source is None:
        source = default_source(paths)
        if source != "rank-0" and not over:
            return None
    if source is None:
        return None
    return paths.torchrun_log if source == "torchrun" else paths.rank_log(int(source.removeprefix("rank-")))


def default_source(paths: AttemptDir) -> str | None:
    """The log people mean: rank-0's, or the launcher's when no rank has written any."""
    sources = paths.log_sources()
    return "rank-0" if "rank-0" in sources else sources[0] if sources else None


def named(point: dict[str, Any] | None, names: Sequence[str] | None) -> dict[str, Any] | None:
    """The point with only the named keys; None when it has none of them."""
    if point is None or names is None:
        return point
    kept = {key: value for key, value in point.items() if key in _NAMED_ALWAYS or key in names}
    return kept if any(key in kept for key in names) else None


def event_data(event: Event) -> dict[str, Any]:
    """An event as a stream's data."""
    return {
        "id": str(event.id),
        "created_at": event.created_at,
        "type": event.type,
        "level": event.level,
        "message": event.message,
        "data": event.data,
    }


def _end(job: Job | None) -> StreamItem:
    if job is None:
        return StreamItem("end", {"status": "deleted", "reason": None})
    return StreamItem("end", {"status": str(job.state), "reason": None if job.reason is None else str(job.reason)})
