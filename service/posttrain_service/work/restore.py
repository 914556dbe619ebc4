"""Put a backup of the embedded database back: only while nothing runs, and nothing that is newer than it is lost."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from posttrain_service.errors import Conflict
from posttrain_service.ids import is_file_id, is_run_id
from posttrain_service.settings import Settings
from posttrain_service.store import backup
from posttrain_service.work.leader import LEADER_LOCK
from posttrain_trainer.contract.locks import LockHeld, hold, is_held
from posttrain_trainer.contract.rundir import RunDir


@dataclass(frozen=True)
class Restored:
    """What a restore did."""

    before: Path | None
    """A backup of the database as it was before; None when there was none."""
    set_aside: list[Path]
    """Folders of runs and uploads that the backup does not know, where they are now."""


def restore(settings: Settings, database: Path, source: Path) -> Restored:
    """Replace the content of the database by that of a backup.

    Runs and uploads that are newer than the backup would be left over and swept away, so they are moved to
    `<storage_dir>/set-aside` first. The next `posttrain serve` brings an older schema up to date.

    Raises:
        NotFound: There is no such backup.
        InvalidRequest: The backup is damaged, empty, or no database of posttrain.
        Conflict: A server or a job is running on this storage.
    """
    backup.check_content(source)
    try:
        with hold(settings.storage_dir / LEADER_LOCK):  # a server that starts meanwhile waits for it before it acts
            _check_idle(settings)
            stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
            before = _keep(database, stamp)
            set_aside = _set_aside(settings, source, settings.storage_dir / "set-aside" / stamp)
            backup.restore(database, source)
    except LockHeld as error:
        raise Conflict("a server is running on this storage directory; stop it first", code="server_running") from error
    return Restored(before, set_aside)


def _check_idle(settings: Settings) -> None:
    """That no attempt has a living process: its rows must not change under it."""
    for folder in _children(settings.jobs_dir):
        for attempt in RunDir(folder).attempts():
            if is_held(attempt.shim_lock, alone=True) or is_held(attempt.run_lock):
                raise Conflict(f"run {folder.name} is still training; cancel or pause its job first", code="job_running")


def _keep(database: Path, stamp: str) -> Path | None:
    if not database.is_file() or database.stat().st_size == 0:
        return None
    before = database.with_name(f"{database.name}.before-restore-{stamp}")
    backup.backup(database, before)
    return before


def _set_aside(settings: Settings, source: Path, to: Path) -> list[Path]:
    runs, files = backup.known_ids(source)
    newer = [path for path in _children(settings.jobs_dir) if is_run_id(path.name) and path.name not in runs]
    newer += [path for path in _children(settings.files_dir) if is_file_id(path.name) and path.name not in files]
    moved = []
    for path in newer:
        to.mkdir(parents=True, exist_ok=True)
        moved.append(path.rename(to / path.name))
    return moved


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
