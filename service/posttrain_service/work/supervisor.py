"""Loop: look -> decide -> apply for every live job. Its first round adopts the jobs that an earlier server left running.

All judgement is in `domain.decide`; here it is carried out. Level-triggered: nothing that a round did is remembered for
the next one, but to read less, so it doesn't matter which server process made it, or whether it was killed half-way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain_service.clock import Clock, Jumps
from posttrain_service.domain.deadlines import Limits, on_entry
from posttrain_service.domain.decide import Act, Action, decide
from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import JobState, is_terminal
from posttrain_service.errors import InvalidRequest, LaunchFailed, Unavailable
from posttrain_service.launch.backend import LaunchBackend
from posttrain_service.logs import log_context
from posttrain_service.settings import Settings
from posttrain_service.store.leases import Lease
from posttrain_service.store.store import Store
from posttrain_service.work.grace import grace_s
from posttrain_service.work.hints import Hints
from posttrain_service.work.ingest import Ingest
from posttrain_service.work.leader import Leader
from posttrain_service.work.redact import Redactor
from posttrain_service.work.result_files import ResultFiles
from posttrain_service.work.scheduler import make_plan
from posttrain_service.work.tails import log_tail
from posttrain_trainer.contract.rundir import RunDir

log = logging.getLogger(__name__)

EAGER_S = 0.05
"""Time between two looks while a job is launching or stopping, where each look may be the one that ends the wait."""
EAGER_FOR_S = 10.0
UNKILLABLE_PAUSE_S = 30.0
"""A sweep that leaves something alive takes seconds; so long it isn't tried again, for the other jobs' sake."""


class Supervisor:
    """Follows live jobs to their end.

    Args:
        settings: Of the service.
        store: Where jobs are.
        backend: Looks at attempts and stops them.
        clock: What time it is.
        hints: To wake the scheduler when devices are free again.
        leader: Says whether this process acts.
        results: Makes the result file of a job that ends.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        backend: LaunchBackend,
        clock: Clock,
        hints: Hints,
        leader: Leader,
        results: ResultFiles,
    ) -> None:
        self._settings = settings
        self._limits = Limits.of(settings)
        self._store = store
        self._backend = backend
        self._clock = clock
        self._jumps = Jumps(clock)
        self._hints = hints
        self._leader = leader
        self._results = results
        self._redactor = Redactor(settings)
        self._ingest = Ingest(store, self._redactor)
        self._unkillable_until: dict[str, float] = {}
        self._known: dict[str, Job] = {}
        self._apply: dict[Act, Callable[[Job, Action, Lease], None]] = {
            Act.WAIT: self._wait,
            Act.START: self._start,
            Act.CONFIRM: self._move,
            Act.STOP: self._stop,
            Act.SWEEP: self._sweep,
            Act.FINISH: self._finish,
        }

    def round(self) -> float | None:
        """Look at every live job and every one whose time is over, and act; seconds until the next look, if soon."""
        lease = self._leader.lease()
        if lease is None:
            return None
        if (jump := self._jumps.since_last()) != 0.0:
            # No job has had more or less time because of it.
            count = self._store.jobs.postpone_deadlines(jump, fence=lease)
            log.warning("the clock was set by %+.0f s (or this host slept): %d deadlines move with it", jump, count)
        live = self._store.jobs.live(self._known)
        known = self._known = {job.run_id: job for job in live}
        self._ingest.forget_all_but(known)
        self._unkillable_until = {run_id: t for run_id, t in self._unkillable_until.items() if run_id in known}
        for job in live:
            self._guarded(job, lease, self._look)
        for job in self._store.jobs.overdue():
            self._guarded(job, lease, self._expire)
        return EAGER_S if any(self._is_eager(job) for job in live) else None

    def _guarded(self, job: Job, lease: Lease, act: Callable[[Job, Lease], None]) -> None:
        with log_context(job=job.job_uuid):
            if self._clock.now() < self._unkillable_until.get(job.run_id, 0.0):
                return
            try:
                act(job, lease)
            except Unavailable as error:
                log.error("%s", error.message)
                if error.code == "still_running":
                    self._unkillable_until[job.run_id] = self._clock.now() + UNKILLABLE_PAUSE_S
            except Exception:  # one job's trouble must not keep the others from being looked after
                log.exception("looking after the job failed; the next round tries again")

    def _look(self, job: Job, lease: Lease) -> None:
        run_dir = self._run_dir(job)
        seen = self._backend.look(run_dir, job.attempt)
        if seen.problem is not None:
            log.warning("%s", seen.problem)
        self._ingest.pull(job, run_dir)
        self._act(job, decide(job, seen, self._clock.now(), self._limits), lease)

    def _expire(self, job: Job, lease: Lease) -> None:
        self._act(job, decide(job, None, self._clock.now(), self._limits), lease)

    def _act(self, job: Job, action: Action, lease: Lease) -> None:
        if action.act is not Act.WAIT:
            log.info("%s job: %s: %s", job.state, action.act, action.why)
        self._apply[action.act](job, action, lease)

    def _wait(self, job: Job, action: Action, lease: Lease) -> None:
        """Nothing to do."""

    def _start(self, job: Job, action: Action, lease: Lease) -> None:
        try:
            self._backend.start(make_plan(self._backend, self._settings, job, job.attempt, job.devices))
        except (InvalidRequest, LaunchFailed) as error:
            log.error("%s", error.message)  # the launch's deadline ends it

    def _stop(self, job: Job, action: Action, lease: Lease) -> None:
        want = action.stop_want
        assert want is not None
        # A cancel has the plan's own grace; a pause may need longer, for the save.
        grace = grace_s(self._store, job, want, self._limits) if want == "pause" else None
        if action.to is not None:
            entry = on_entry(job, action.to, self._clock.now(), self._limits, grace_s=grace)
            if self._moved(job, action, lease, entry) is None:
                return
        self._backend.stop(self._run_dir(job), job.attempt, want, grace_s=grace)

    def _sweep(self, job: Job, action: Action, lease: Lease) -> None:
        killed = self._backend.sweep(self._run_dir(job), job.attempt)
        log.warning("%d leftover processes of the job were killed", killed)
        self._hints.supervisor.give()

    def _finish(self, job: Job, action: Action, lease: Lease) -> None:
        run_dir = self._run_dir(job)
        if action.sweep:
            # First it can't start any more, then nothing of it is left, and only then are its devices free.
            self._backend.stop(run_dir, job.attempt, action.stop_want or "cancel")
            self._backend.sweep(run_dir, job.attempt)
            self._ingest.pull(job, run_dir)
        action = self._timed(job, action)
        if action.to is not None and is_terminal(action.to):
            self._results.make(job)  # first, so that whoever sees the end finds the file
        moved = self._moved(job, action, lease, self._error(job, action, run_dir))
        if moved is not None:
            self._hints.scheduler.give()

    def _move(self, job: Job, action: Action, lease: Lease) -> None:
        self._moved(job, action, lease)

    def _moved(self, job: Job, action: Action, lease: Lease, extra: dict[str, Any] | None = None) -> Job | None:
        assert action.to is not None
        run_dir = self._run_dir(job)
        changes = action.changes | (extra or {})
        said = {key: self._redactor.value(changes[key], run_dir) for key in ("error", "warnings") if key in changes}
        return self._store.jobs.move(
            job.run_id,
            {job.state},
            action.to,
            via=action.via,
            event=[self._redactor.event(event, run_dir) for event in action.events],
            changes=changes | said,
            expected_attempt=job.attempt,
            expected_version=job.version,
            fence=lease,
        )

    def _timed(self, job: Job, action: Action) -> Action:
        """The end of a stop tells how long it took, from the request until no process was left."""
        if job.state is not JobState.STOPPING or not action.sweep:
            return action
        took = {"stop_took_s": round(max(0.0, self._clock.now() - job.moved_at), 3)}
        events = tuple(replace(e, data=e.data | took) if e.type == action.to else e for e in action.events)
        return replace(action, events=events)

    def _error(self, job: Job, action: Action, run_dir: RunDir) -> dict[str, Any]:
        """The error with the end of the log that explains it."""
        error = action.changes.get("error")
        if not action.sweep or error is None:
            return {}
        return {"error": error | {"log_tail": log_tail(run_dir.attempt(job.attempt), error.get("rank"))}}

    def _is_eager(self, job: Job) -> bool:
        waits = job.state in (JobState.LAUNCHING, JobState.STOPPING)
        return waits and self._clock.now() - job.moved_at < EAGER_FOR_S

    def _run_dir(self, job: Job) -> RunDir:
        return RunDir(self._settings.jobs_dir / job.run_id)
