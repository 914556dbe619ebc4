"""Cancel, pause, resume, retry and delete: what a client may ask of a job that exists. All idempotent.

A verb writes what is wanted and wakes a loop; only the supervisor touches processes. A move that somebody else made
first is looked at again, so a verb answers for the state that the job really was in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain_service.clock import Clock
from posttrain_service.domain.deadlines import Limits, on_entry
from posttrain_service.domain.job import Job, NewEvent, Want
from posttrain_service.domain.lifecycle import EndReason, JobState, Verb, check_verb, is_terminal
from posttrain_service.errors import Conflict, NotFound, StoreBusy
from posttrain_service.logs import log_context
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work.grace import grace_s
from posttrain_service.work.hints import Hints
from posttrain_service.work.result_files import forget, result_file_id
from posttrain_trainer.contract.folders import remove_tree

log = logging.getLogger(__name__)

_TRIES = 20


@dataclass(frozen=True)
class Verbs:
    """The verbs, by job_uuid. An unknown job is NotFound, a contradiction a Conflict."""

    settings: Settings
    store: Store
    clock: Clock
    hints: Hints

    def find(self, job_uuid: str) -> Job:
        """The job.

        Raises:
            NotFound: There is none.
        """
        job = self.store.jobs.get(job_uuid)
        if job is None:
            raise NotFound(f"there is no job {job_uuid[:140]!r}", code="job_not_found", param="job_uuid")
        return job

    def cancel(self, job_uuid: str) -> Job:
        """End it for good: at once where nothing runs, else as soon as its processes are gone."""
        return self._act("cancel", job_uuid, self._cancel)

    def pause(self, job_uuid: str) -> Job:
        """Have it save and stop, so that it can go on later."""
        return self._act("pause", job_uuid, self._pause)

    def resume(self, job_uuid: str) -> Job:
        """Queue a paused job again."""
        return self._act("resume", job_uuid, self._requeue("resumed", "the job goes on: it is queued again"))

    def retry(self, job_uuid: str) -> Job:
        """Queue a failed or cancelled job again; it goes on from its newest complete checkpoint."""
        return self._act("retry", job_uuid, self._requeue("retried", "the job is tried again: it is queued", {"retries": 0}))

    def delete(self, job_uuid: str) -> None:
        """Remove an ended job: hidden first, then its artifacts, then its row, so that a crash leaves nothing half-seen."""
        job = self.find(job_uuid)
        check_verb("delete", job_uuid, job.state)
        if not self.store.jobs.condemn(job.run_id):
            self.find(job_uuid)  # somebody else has deleted it meanwhile
            raise Conflict(f"cannot delete job {job_uuid}: it is being retried; cancel it first", code="cannot_delete")
        remove(self.store, self.settings, job)

    def _act(self, verb: Verb, job_uuid: str, act: Callable[[Job], Job | None]) -> Job:
        for _ in range(_TRIES):
            job = self.find(job_uuid)
            if not check_verb(verb, job_uuid, job.state, job.want, job.reason):
                return job
            moved = act(job)
            if moved is not None:
                self.hints.supervisor.give()
                self.hints.scheduler.give()
                return moved
        raise StoreBusy(f"job {job_uuid} changes faster than it can be asked to {verb}; try again")

    def _cancel(self, job: Job) -> Job | None:
        if job.state in (JobState.QUEUED, JobState.PAUSED):
            event = NewEvent("cancelled", f"the job was cancelled while it was {job.state}")
            return self._move(job, JobState.CANCELLED, event, {"reason": EndReason.CANCELLED, "want": None})
        return self._stop(job, "cancel")

    def _pause(self, job: Job) -> Job | None:
        if job.state is JobState.QUEUED:
            event = NewEvent("paused", "the job was paused while it was queued")
            return self._move(job, JobState.PAUSED, event, {"reason": EndReason.PAUSED})
        return self._stop(job, "pause")

    def _stop(self, job: Job, want: Want) -> Job | None:
        event = NewEvent("stopping", f"the job was asked to {want}", data={"want": want, "attempt": job.attempt})
        limits = Limits.of(self.settings)
        entry = on_entry(job, JobState.STOPPING, self.clock.now(), limits, grace_s=grace_s(self.store, job, want, limits))
        changes: dict[str, Any] = entry | {"want": want, "reason": None}
        if job.state is JobState.STOPPING:  # a pause becomes a cancel, a pre-emption a pause, with a grace of its own
            return self.store.jobs.update(job.run_id, changes, expected=(JobState.STOPPING,), event=event)
        return self._move(job, JobState.STOPPING, event, changes)

    def _requeue(
        self, kind: str, message: str, changes: dict[str, Any] | None = None
    ) -> Callable[[Job], Job | None]:
        return lambda job: self._move(job, JobState.QUEUED, NewEvent(kind, message), changes or {})

    def _move(self, job: Job, to: JobState, event: NewEvent, changes: dict[str, Any]) -> Job | None:
        entry = on_entry(job, to, self.clock.now(), Limits.of(self.settings))
        return self.store.jobs.move(
            job.run_id, {job.state}, to, event=event, changes=entry | changes, expected_attempt=job.attempt
        )


def remove(store: Store, settings: Settings, job: Job) -> None:
    """Remove the artifacts and then the row of a condemned job; safe to repeat after a crash, and to do twice at a time."""
    assert is_terminal(job.state), "only ended jobs are removed"
    remove_tree(settings.jobs_dir / job.run_id)
    try:
        forget(store, job.run_id)
        (settings.files_dir / result_file_id(job.run_id)).unlink(missing_ok=True)
    except Conflict as error:  # the file then stays, like any other
        with log_context(job=job.job_uuid):
            log.warning("%s", error.message)
    store.jobs.delete(job.run_id)
