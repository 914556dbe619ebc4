"""What is wrong with a storage directory, and why a job isn't running, in plain words. Looks only; changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain_service.domain.job import Job
from posttrain_service.domain.queueing import order
from posttrain_service.domain.slots import check_fits, fit
from posttrain_service.errors import InvalidRequest, ServiceError
from posttrain_service.ids import is_file_id, is_run_id
from posttrain_service.launch.tools import run_tool
from posttrain_service.settings import Settings
from posttrain_service.store.leases import SCHEDULER
from posttrain_service.store.store import Store
from posttrain_service.work.leader import LEADER_LOCK
from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.locks import is_held

_TRAINER_S = 120.0


@dataclass(frozen=True)
class Finding:
    """One thing that somebody should know."""

    level: Literal["error", "warning", "note"]
    """error: something doesn't work; warning: something is out of order; note: an explanation."""
    about: str
    """The job, file, folder or part that it concerns."""
    message: str


@dataclass(frozen=True)
class Doctor:
    """Examines one storage directory and its database."""

    settings: Settings
    store: Store
    slots: Sequence[str]

    def examine(self) -> list[Finding]:
        """Everything that was found: the set-up first, then what is out of order, then why jobs wait."""
        return [*self.setup(), *self.orphans(), *self.waiting()]

    def setup(self) -> list[Finding]:
        """Faults of the installation: the trainer's interpreter, the disk, the server."""
        found = []
        if (fault := self._trainer_fault()) is not None:
            found.append(Finding("error", "trainer", fault))
        if (fault := self._disk_fault()) is not None:
            found.append(Finding("error", "disk", fault))
        if not self._is_led():
            text = "no server is acting on this storage: nothing is launched or looked after; start `posttrain serve`"
            found.append(Finding("warning", "server", text))
        return found

    def orphans(self) -> list[Finding]:
        """Folders without a row, and rows without their folder or file."""
        found = []
        runs = self.store.jobs.owners()
        for folder in _names(self.settings.jobs_dir):
            if folder not in runs:
                ours = is_run_id(folder)
                text = "a run's folder without a job; the sweeper removes it" if ours else "not posttrain's; nothing touches it"
                found.append(Finding("warning", f"jobs/{folder}", text))
        for run_id in sorted(set(runs) - set(_names(self.settings.jobs_dir))):
            job = self.store.jobs.get_run(run_id)
            if job is not None:  # else it is being deleted, folder first
                text = "the folder of the job is gone, with its logs and checkpoints; delete the job"
                found.append(Finding("error", f"job {job.job_uuid}", text))
        names = [name for name in _names(self.settings.files_dir) if is_file_id(name)]
        for name in sorted(set(names) - self.store.files.known(names)):
            text = "bytes without an entry in the list of files; the sweeper removes them"
            found.append(Finding("warning", f"files/{name}", text))
        for file_id in sorted(self.store.files.ids() - set(names)):
            text = "the bytes of the file are gone; delete it and upload it again"
            found.append(Finding("error", f"file {file_id}", text))
        return found

    def waiting(self) -> list[Finding]:
        """Why each job that has not ended isn't running, in the order of the queue."""
        found = []
        queued = order(self.store.jobs.queued(), self.store.jobs.count_live_by_owner())
        for place, job in enumerate(queued, start=1):
            text = f"queued at place {place} of {len(queued)}: {self._why_queued(job)}"
            found.append(Finding("note", f"job {job.job_uuid}", text))
        for job in self.store.jobs.paused():
            newest = self.store.events.page(job.job_uuid, limit=1, newest_first=True).data
            text = newest[0].message if newest else "it was paused"
            text = f"paused ({job.reason}): {text}; to go on: posttrain jobs resume {job.job_uuid}"
            found.append(Finding("note", f"job {job.job_uuid}", text))
        return found

    def _why_queued(self, job: Job) -> str:
        if not self._is_led():
            return "no server is acting on this storage; start `posttrain serve`"
        if (fault := self._disk_fault()) is not None:
            return f"nothing is launched: {fault}"
        try:
            check_fits(job.devices_wanted, self.slots)
        except InvalidRequest as error:
            return f"{error.message}; cancel it, or give the host its devices back"
        holders = {slot.device: slot.run_id for slot in self.store.slots.taken()}
        if fit(job.devices_wanted, self.slots, set(holders)) is not None:
            return "its devices are free; it is launched in a moment, after those before it"
        names = {live.run_id: live.job_uuid for live in self.store.jobs.live()}
        taken = ", ".join(f"{device} by job {names.get(run_id, run_id)}" for device, run_id in sorted(holders.items()))
        wanted = job.devices_wanted if isinstance(job.devices_wanted, int | str) else ", ".join(job.devices_wanted)
        return f"it waits for devices ({wanted}); taken are {taken}"

    def _is_led(self) -> bool:
        return is_held(self.settings.storage_dir / LEADER_LOCK) or self.store.leases.holder(SCHEDULER) is not None

    def _disk_fault(self) -> str | None:
        free, reserve = shutil.disk_usage(self.settings.storage_dir).free, self.settings.disk_reserve_bytes
        if free >= reserve:
            return None
        what = "delete jobs or files, or lower POSTTRAIN_DISK_RESERVE_BYTES"
        return f"{free:,} bytes are free, and {reserve:,} must stay free; {what}"

    def _trainer_fault(self) -> str | None:
        python = self.settings.trainer_python
        if not python.is_file():
            return f"{python} is not there; set POSTTRAIN_TRAINER_PYTHON to the interpreter that has torch and posttrain"
        try:
            answer = run_tool(python, "version", {}, _TRAINER_S)
        except ServiceError as error:
            return f"{python} cannot run the trainer: {error.message}"
        if answer.get("contract") != CONTRACT_VERSION:
            has = answer.get("contract")
            return f"{python} has a trainer of contract {has}, this service needs {CONTRACT_VERSION}; install one version in both"
        if not (answer.get("packages") or {}).get("torch"):
            return f"{python} has no torch; install posttrain[train] there"
        return None


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
