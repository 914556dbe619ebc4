"""Jobs as the faces see them: the row, what its run directory says now, its place in the queue; and its files."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain_service.domain.job import Job
from posttrain_service.domain.keys import DEFAULT_OWNER
from posttrain_service.domain.lifecycle import JobState, is_live
from posttrain_service.domain.queueing import positions
from posttrain_service.errors import Conflict, InvalidRequest, NotFound
from posttrain_service.runs import read, tail
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work.dryrun import DryRun
from posttrain_service.work.result_files import ResultFiles
from posttrain_service.work.services import EventView, JobView, LogText, Page
from posttrain_service.work.streams import check_source, default_source, event_cursor
from posttrain_service.work.submit import Submitter
from posttrain_service.work.terms import Terms
from posttrain_service.work.usage import Usage
from posttrain_service.work.validator import Validator
from posttrain_service.work.verbs import Verbs
from posttrain_trainer.contract.folders import TRASH, remove_tree
from posttrain_trainer.contract.plainfile import is_plain
from posttrain_trainer.contract.rundir import AttemptDir, RunDir

if TYPE_CHECKING:
    from posttrain_service.wire.jobs import JobRequest
    from posttrain_service.wire.openai_request import Asked

MAX_LOG_BYTES = 4 * 1024 * 1024
"""Most bytes of one answer with log text."""


@dataclass(frozen=True)
class Jobs:
    """See `JobService`."""

    settings: Settings
    store: Store
    submitter: Submitter
    verbs: Verbs
    dry_run: DryRun
    validator: Validator
    results: ResultFiles
    usage: Usage = field(default_factory=Usage)
    owner: str = DEFAULT_OWNER
    """Whose jobs are made here."""

    def create(
        self,
        request: JobRequest,
        *,
        idempotency_key: str | None = None,
        owner: str | None = None,
        terms: Terms | None = None,
    ) -> tuple[JobView, bool]:
        """See `JobService.create`."""
        job, new = self.submitter.create(request, idempotency_key=idempotency_key, owner=owner or self.owner, terms=terms)
        return self._view(job, self._positions()), new

    def accept(
        self, asked: Asked, *, idempotency_key: str | None = None, owner: str | None = None
    ) -> tuple[JobView, bool]:
        """See `JobService.accept`."""
        job, new = self.validator.accept(asked, idempotency_key=idempotency_key, owner=owner or self.owner)
        return JobView(job) if new else self.get(job.job_uuid), new  # a stored job is answered for without further reading

    def states(self) -> list[tuple[str, JobState]]:
        """See `JobService.states`."""
        return self.store.jobs.states()

    def result_files(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """See `JobService.result_files`."""
        return self.results.of(jobs)

    def plan(self, request: JobRequest) -> dict[str, Any]:
        """See `JobService.plan`."""
        return self.dry_run.plan(request)

    def get(self, job_uuid: str) -> JobView:
        """See `JobService.get`."""
        job = self.verbs.find(job_uuid)
        return self._view(job, self._positions() if job.state is JobState.QUEUED else {})

    def page(
        self,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        status: Sequence[str] = (),
        owner: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page[JobView]:
        """See `JobService.page`."""
        _check_limit(limit, 100)
        found = self.store.jobs.page(
            after=after, before=before, limit=limit, status=_states(status), owner=owner, metadata=metadata
        )
        places = self._positions() if any(job.state is JobState.QUEUED for job in found.data) else {}
        ids = [job.job_uuid for job in found.data]
        views = [self._view(job, places) for job in found.data]
        return Page(views, found.has_more, ids[0] if ids else None, ids[-1] if ids else None)

    def cancel(self, job_uuid: str) -> JobView:
        """See `JobService.cancel`."""
        return self._view(self.verbs.cancel(job_uuid), {})

    def pause(self, job_uuid: str) -> JobView:
        """See `JobService.pause`."""
        return self._view(self.verbs.pause(job_uuid), {})

    def resume(self, job_uuid: str) -> JobView:
        """See `JobService.resume`."""
        return self._view(self.verbs.resume(job_uuid), self._positions())

    def retry(self, job_uuid: str) -> JobView:
        """See `JobService.retry`."""
        return self._view(self.verbs.retry(job_uuid), self._positions())

    def delete(self, job_uuid: str) -> None:
        """See `JobService.delete`."""
        self.verbs.delete(job_uuid)

    def events(
        self, job_uuid: str, *, after: str | None = None, limit: int = 100, newest_first: bool = False
    ) -> Page[EventView]:
        """See `JobService.events`."""
        _check_limit(limit, 1000)
        job = self.verbs.find(job_uuid)
        found = self.store.events.page(
            job.job_uuid, after=event_cursor(after), limit=limit, newest_first=newest_first
        )
        views = [EventView(str(e.id), e.created_at, e.type, e.level, e.message, e.data) for e in found.data]
        return Page(views, found.has_more, views[0].id if views else None, views[-1].id if views else None)

    def logs(
        self,
        job_uuid: str,
        *,
        attempt: int | None = None,
        source: str | None = None,
        tail: int | None = None,
        offset: int | None = None,
        limit: int | None = None,
    ) -> LogText:
        """See `JobService.logs`."""
        if tail is not None and (offset is not None or limit is not None):
            raise InvalidRequest("tail and offset or limit exclude each other; give one", param="tail")
        check_source(source)
        job = self.verbs.find(job_uuid)
        paths = self._attempt(job, attempt)
        name = source or default_source(paths) or "torchrun"
        path = paths.torchrun_log if name == "torchrun" else paths.rank_log(int(name.removeprefix("rank-")))
        if source is not None and not is_plain(path):
            written = ", ".join(paths.log_sources()) or "none yet"
            raise NotFound(f"attempt {paths.number} of the job has no log {source!r}; it has {written}", param="source")
        chunk = _log_chunk(path, tail, offset or 0, limit, final=not is_live(job.state) or paths.number != job.attempt)
        return LogText(chunk.text, paths.number, name, chunk.start, chunk.end, chunk.size)

    def log_sources(self, job_uuid: str) -> dict[int, list[str]]:
        """See `JobService.log_sources`."""
        return {attempt.number: attempt.log_sources() for attempt in self._run(job_uuid).attempts()}

    def metrics(
        self,
        job_uuid: str,
        *,
        names: Sequence[str] | None = None,
        after_step: int | None = None,
        max_points: int | None = None,
    ) -> list[dict[str, Any]]:
        """See `JobService.metrics`."""
        if max_points is not None:
            _check_limit(max_points, 1_000_000, "max_points")
        return read.metrics(self._run(job_uuid), names=names, after_step=after_step, max_points=max_points)

    def checkpoints(self, job_uuid: str) -> list[dict[str, Any]]:
        """See `JobService.checkpoints`."""
        return self._checkpoints(self.verbs.find(job_uuid))

    def checkpoint(self, job_uuid: str, checkpoint_id: str) -> dict[str, Any]:
        """See `JobService.checkpoint`."""
        for found in self.checkpoints(job_uuid):
            if found["id"] == checkpoint_id:
                return found
        raise NotFound(
            f"job {job_uuid} has no complete checkpoint {checkpoint_id[:80]!r}",
            code="checkpoint_not_found",
            param="checkpoint_id",
        )

    def checkpoint_file(self, job_uuid: str, checkpoint_id: str, path: str) -> tuple[Path, int]:
        """See `JobService.checkpoint_file`."""
        return read.checkpoint_file(self._run(job_uuid), checkpoint_id, path)

    def checkpoint_files(self, job_uuid: str, checkpoint_id: str) -> list[tuple[str, Path, int]]:
        """See `JobService.checkpoint_files`."""
        return read.checkpoint_files(self._run(job_uuid), checkpoint_id)

    def delete_checkpoint(self, job_uuid: str, checkpoint_id: str) -> None:
        """See `JobService.delete_checkpoint`."""
        self.checkpoint(job_uuid, checkpoint_id)
        job = self.verbs.find(job_uuid)
        folder = self._run_dir(job).checkpoint(checkpoint_id)
        # A retry may write a checkpoint of the same name while this one is being removed: it makes room for it at once.
        trash = folder.with_name(f"{TRASH}{checkpoint_id}-{uuid.uuid4().hex}")
        if not self.store.jobs.while_ended(job.run_id, lambda: _rename(folder, trash)):
            job = self.verbs.find(job_uuid)  # it may have been deleted meanwhile
            raise Conflict(
                f"job {job_uuid} is {job.state} and goes on from its checkpoints; cancel it or wait for its end",
                code="job_live",
                param="checkpoint_id",
            )
        remove_tree(trash)

    def _view(self, job: Job, places: Mapping[str, int]) -> JobView:
        run_dir = self._run_dir(job)
        live = is_live(job.state)
        progress = read.progress(run_dir, job.attempt) if live and job.attempt else None
        if progress is None and job.progress is not None:
            progress = read.with_percent(job.progress)
        return JobView(
            job=job,
            progress=progress,
            metrics=read.latest(run_dir),
            checkpoints=self._checkpoints(job),
            queue_position=places.get(job.run_id) if job.state is JobState.QUEUED else None,
            resources={"devices": job.devices, **self.usage.of(job.run_id, job.attempt)} if live else None,
        )

    def _positions(self) -> dict[str, int]:
        return positions(self.store.jobs.queued(), self.store.jobs.count_live_by_owner())

    def _checkpoints(self, job: Job) -> list[dict[str, Any]]:
        return read.checkpoints(self._run_dir(job), best_metric=job.spec["training"]["best_metric"])

    def _attempt(self, job: Job, number: int | None) -> AttemptDir:
        if job.attempt == 0:
            raise NotFound(f"job {job.job_uuid} has not been launched yet, so it has no logs", param="attempt")
        chosen = job.attempt if number is None else number
        if not 1 <= chosen <= job.attempt:
            raise NotFound(f"job {job.job_uuid} has attempts 1 to {job.attempt}, not {chosen}", param="attempt")
        return self._run_dir(job).attempt(chosen)

    def _run(self, job_uuid: str) -> RunDir:
        return self._run_dir(self.verbs.find(job_uuid))

    def _run_dir(self, job: Job) -> RunDir:
        return RunDir(self.settings.jobs_dir / job.run_id)


def _rename(folder: Path, trash: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody else removes it
        folder.rename(trash)


def _log_chunk(path: Path, lines: int | None, offset: int, limit: int | None, *, final: bool) -> tail.Chunk:
    if lines is not None:
        _check_limit(lines, 1_000_000, "tail", least=0)
        return tail.tail(path, lines, final=final, max_bytes=MAX_LOG_BYTES)
    wanted = MAX_LOG_BYTES if limit is None else limit
    _check_limit(wanted, MAX_LOG_BYTES)
    if offset < 0:
        raise InvalidRequest(f"offset is {offset}; give 0 or more", param="offset")
    return tail.read(path, offset, wanted, final=final)


def _states(names: Sequence[str]) -> list[JobState]:
    known = [str(state) for state in JobState]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"status {name[:80]!r} is none of {', '.join(known)}", param="status")
    return [JobState(name) for name in names]


def _check_limit(value: int, most: int, name: str = "limit", least: int = 1) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is {value}; give {least} to {most}", param=name)
