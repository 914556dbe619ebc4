"""Loop: queue order -> devices -> launch. One server process acts at a time, by lease.

The move to launching takes the devices in the same transaction; only then is anything started. A crash in between
leaves a launching job of which nothing is seen, and the supervisor starts it again or ends it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace

from posttrain_service import traces
from posttrain_service.clock import Clock
from posttrain_service.domain.checking import is_checking
from posttrain_service.domain.deadlines import Limits, on_entry
from posttrain_service.domain.job import Job, NewEvent
from posttrain_service.domain.lifecycle import EndReason, JobState
from posttrain_service.domain.queueing import choose
from posttrain_service.errors import InvalidRequest, LaunchFailed
from posttrain_service.launch.backend import LaunchBackend, Plan
from posttrain_service.logs import log_context
from posttrain_service.settings import Settings
from posttrain_service.store.leases import Lease
from posttrain_service.store.store import Store
from posttrain_service.work.grace import grace_s
from posttrain_service.work.hints import Hints
from posttrain_service.work.leader import Leader
from posttrain_service.work.prepare import torch_arguments, train_arguments
from posttrain_trainer.contract.rundir import RunDir

log = logging.getLogger(__name__)


class Scheduler:
    """Launches queued jobs.

    Args:
        settings: Of the service.
        store: Where jobs and devices are.
        backend: Starts attempts.
        clock: What time it is.
        hints: To wake the supervisor.
        leader: Says whether this process acts.
        slots: Names of all devices of this host.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        backend: LaunchBackend,
        clock: Clock,
        hints: Hints,
        leader: Leader,
        slots: Sequence[str],
    ) -> None:
        self._settings = settings
        self._store = store
        self._backend = backend
        self._clock = clock
        self._hints = hints
        self._leader = leader
        self._slots = tuple(slots)
        self._was_low = False  # so that the log says it once, not every second

    def round(self) -> None:
        """Launch everything that can be launched now."""
        lease = self._leader.lease()
        if lease is None:
            return
        queued = [job for job in self._store.jobs.queued() if not is_checking(job)]
        if not queued or self._is_disk_low():
            return
        taken = [slot.device for slot in self._store.slots.taken()]
        live = self._store.jobs.count_live_by_owner()
        holders = self._store.jobs.live() if self._settings.preemption else None
        choice = choose(queued, live, self._slots, taken, self._clock.now(), live=holders)
        for job, devices in choice.launches:
            with log_context(job=job.job_uuid):
                self._launch(job, devices, lease)
        for victim, job in choice.preemptions:
            with log_context(job=victim.job_uuid):
                self._preempt(victim, job, lease)

    def _launch(self, job: Job, devices: Sequence[str], lease: Lease) -> None:
        try:
            plan = make_plan(self._backend, self._settings, job, job.attempt + 1, devices)
        except InvalidRequest as error:
            # What was fine when the job was accepted has gone since, e.g. its model.
            self._fail(job, error, lease)
            return
        event = NewEvent(
            "launching",
            f"attempt {plan.attempt} is launched on {', '.join(devices)}",
            data={"attempt": plan.attempt, "devices": list(devices)},
        )
        entry = on_entry(job, JobState.LAUNCHING, self._clock.now(), Limits.of(self._settings))
        moved = self._store.jobs.move(
            job.run_id,
            {JobState.QUEUED},
            JobState.LAUNCHING,
            event=event,
            changes=entry | {"devices": list(devices)},
            expected_attempt=job.attempt,
            fence=lease,
            take=devices,
        )
        if moved is None:
            return
        try:
            self._backend.start(plan)
        except LaunchFailed as error:
            # The supervisor sees a launch of which nothing came, and judges it.
            log.error("%s", error.message)
            self._store.events.append(job.run_id, NewEvent("warning", error.message, "error", {"attempt": plan.attempt}))
        self._hints.supervisor.give()

    def _preempt(self, victim: Job, job: Job, lease: Lease) -> None:
        """Have a running job save and make room; at its end the supervisor queues it again."""
        limits = Limits.of(self._settings)
        grace = grace_s(self._store, victim, "pause", limits)
        text = f"the job makes room for job {job.job_uuid} of priority {job.priority}: it saves a checkpoint and is queued again"
        data = {"attempt": victim.attempt, "want": "pause", "reason": str(EndReason.PREEMPTED), "for": job.job_uuid}
        moved = self._store.jobs.move(
            victim.run_id,
            {JobState.RUNNING},
            JobState.STOPPING,
            event=NewEvent("stopping", text, data=data),
            changes=on_entry(victim, JobState.STOPPING, self._clock.now(), limits, grace_s=grace)
            | {"want": "pause", "reason": EndReason.PREEMPTED},
            expected_attempt=victim.attempt,
            fence=lease,
        )
        if moved is not None:
            self._hints.supervisor.give()

    def _fail(self, job: Job, error: InvalidRequest, lease: Lease) -> None:
        reason = EndReason.MODEL_NOT_FOUND if error.param == "model" else EndReason.INVALID_ARGUMENTS
        record = {"code": str(reason), "message": error.message, "rank": None, "log_tail": None}
        entry = on_entry(job, JobState.FAILED, self._clock.now(), Limits.of(self._settings))
        self._store.jobs.move(
            job.run_id,
            {JobState.QUEUED},
            JobState.FAILED,
            event=NewEvent("failed", error.message, "error", {"reason": str(reason)}),
            changes=entry | {"reason": reason, "error": record},
            expected_attempt=job.attempt,
            fence=lease,
        )
        self._hints.scheduler.give()  # its devices were meant for it: choose again at once

    def _is_disk_low(self) -> bool:
        free = shutil.disk_usage(self._settings.storage_dir).free
        is_low = free < self._settings.disk_reserve_bytes
        if is_low and not self._was_low:
            log.warning("nothing is launched while only %d bytes are free, which is below the reserve", free)
        self._was_low = is_low
        return is_low


def make_plan(backend: LaunchBackend, settings: Settings, job: Job, attempt: int, devices: Sequence[str]) -> Plan:
    """The plan of one attempt of a stored job.

    Raises:
        InvalidRequest: The model has gone, or the backend cannot honour an argument.
    """
    run_dir = RunDir(settings.jobs_dir / job.run_id)
    train_args = train_arguments(job.spec, run_dir, settings.base_models_dir)
    torch_args = torch_arguments(job.spec, len(devices))
    plan = backend.plan(job.run_id, attempt, run_dir, train_args, torch_args, devices)
    return replace(plan, env=plan.env | traces.environment(job.spec.get(traces.TRACE), job.run_id, attempt))
