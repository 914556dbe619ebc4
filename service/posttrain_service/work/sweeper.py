"""Loop: remove what has outlived its time: ended jobs, files, idempotency keys, and what crashes left on disk.

Artifacts go first and rows last, and a job is hidden before anything of it goes, so a sweeper that is killed anywhere
is succeeded by one that goes on. `outlook` says what a round would remove, without removing it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from posttrain_service.clock import Clock
from posttrain_service.errors import Conflict, NotFound
from posttrain_service.ids import is_run_id
from posttrain_service.runs.blobs import Blobs
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work import parts
from posttrain_service.work.datasets import SCRATCH_PREFIX
from posttrain_service.work.leader import Leader
from posttrain_service.work.verbs import remove
from posttrain_trainer.contract.folders import remove_tree

log = logging.getLogger(__name__)

LEFTOVER_AGE_S = 3600.0
"""Bytes and folders without a row are left over from a crash only when they have lain this long: a request may be writing them."""
_BATCH = 100


@dataclass
class Swept:
    """What a round removed, or would remove."""

    jobs: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    """Names of files and folders without a row."""
    keys: int = 0
    """Idempotency keys (not counted by `outlook`)."""


@dataclass(frozen=True)
class Sweeper:
    """Removes what has outlived its time."""

    settings: Settings
    store: Store
    clock: Clock
    blobs: Blobs
    leader: Leader

    def round(self) -> None:
        """One sweep, if this process acts."""
        if self.leader.lease() is None:
            return
        swept = self.sweep()
        if swept.jobs or swept.files or swept.leftovers:
            log.info(
                "removed %d jobs, %d files and %d leftovers", len(swept.jobs), len(swept.files), len(swept.leftovers)
            )

    def sweep(self) -> Swept:
        """Remove everything that is due."""
        swept = Swept(keys=self.store.idempotency.forget_expired())
        for job in self.store.jobs.condemned():  # a deletion that a crash interrupted
            remove(self.store, self.settings, job)
            swept.jobs.append(job.job_uuid)
        while due := self.store.jobs.expired(limit=_BATCH):
            for job in due:
                if self.store.jobs.condemn(job.run_id):  # else it was retried meanwhile
                    remove(self.store, self.settings, job)
                    swept.jobs.append(job.job_uuid)
        for file in self.store.files.expired(limit=_BATCH):
            try:
                self.store.files.delete(file.id)
            except (Conflict, NotFound):  # a job began to use it, or somebody deleted it
                continue
            self.blobs.delete(file.id)
            swept.files.append(file.id)
        for name in self._leftover_files():
            self.blobs.delete(name)
            swept.leftovers.append(name)
        for folder in [*self._leftover_runs(), *self._leftover_scratch()]:
            remove_tree(folder)
            swept.leftovers.append(folder.name)
        swept.leftovers += parts.sweep(self.settings, self.clock.now())
        return swept

    def outlook(self) -> Swept:
        """What `sweep` would remove now (the first hundred of each kind); nothing is touched."""
        return Swept(
            jobs=[job.job_uuid for job in [*self.store.jobs.condemned(), *self.store.jobs.expired(limit=_BATCH)]],
            files=[file.id for file in self.store.files.expired(limit=_BATCH)],
            leftovers=[*self._leftover_files(), *(f.name for f in [*self._leftover_runs(), *self._leftover_scratch()])],
        )

    def _leftover_files(self) -> list[str]:
        names = list(self.blobs.leftovers(self.clock.now(), LEFTOVER_AGE_S))
        known = self.store.files.known(names)
        return [name for name in names if name not in known]

    def _leftover_runs(self) -> list[Path]:
        """Folders of runs whose row was never written."""
        folders = [path for path in self._old(self.settings.jobs_dir) if is_run_id(path.name)]
        return [folder for folder in folders if not self.store.jobs.exists(folder.name)]

    def _leftover_scratch(self) -> list[Path]:
        """Folders that a check of rows was killed in."""
        return [path for path in self._old(self.settings.storage_dir) if path.name.startswith(SCRATCH_PREFIX)]

    def _old(self, parent: Path) -> list[Path]:
        """Folders in `parent` that have not been touched for long."""
        folders = [path for path in sorted(parent.iterdir()) if path.is_dir() and not path.is_symlink()]
        return [folder for folder in folders if self.clock.now() - _touched(folder) >= LEFTOVER_AGE_S]


def _touched(folder: Path) -> float:
    """When a folder was changed last; one that has vanished meanwhile was changed just now, so it is left alone."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
