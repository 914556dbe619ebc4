"""`posttrain db ...`: schema and backups of the database, on the machine that has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Engine, make_url

from posttrain_service.cli.common import sentences
from posttrain_service.cli.serve import read_settings
from posttrain_service.clock import SystemClock
from posttrain_service.errors import Conflict, StoreMismatch
from posttrain_service.runs.blobs import Blobs
from posttrain_service.settings import Settings
from posttrain_service.store import backup as backups
from posttrain_service.store.engine import make_engine
from posttrain_service.store.store import Store
from posttrain_service.store.upgrade import current, head, is_current
from posttrain_service.store.upgrade import upgrade as bring_up_to_date
from posttrain_service.work.leader import Leader
from posttrain_service.work.restore import restore as put_back
from posttrain_service.work.sweeper import Sweeper

app = typer.Typer(help="Look after the database: its schema, its backups.", no_args_is_help=True)

StorageOption = Annotated[
    Path | None, typer.Option("--storage-dir", help="Folder of the embedded database; POSTTRAIN_STORAGE_DIR unless told.")
]
UrlOption = Annotated[
    str | None, typer.Option("--database-url", help="SQLAlchemy URL; POSTTRAIN_DATABASE_URL unless told.")
]


@app.command()
def upgrade(storage_dir: StorageOption = None, database_url: UrlOption = None) -> None:
    """Bring the schema up to this build. On PostgreSQL this is never done by `posttrain serve` itself."""
    with sentences(), _engine(storage_dir, database_url) as engine:
        was = current(engine)
        done = bring_up_to_date(engine)
        print(f"{was or 'empty'} -> {head()}" if done else f"already at {head()}")


@app.command()
def check(storage_dir: StorageOption = None, database_url: UrlOption = None) -> None:
    """Say which schema the database has; exit code 1 when this build needs another one."""
    with sentences(), _engine(storage_dir, database_url) as engine:
        good = is_current(engine)
        print(f"database: {current(engine) or 'empty'}; this build: {head()}")
    if not good:
        raise typer.Exit(1)


@app.command()
def backup(
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The new file; nothing is replaced.")],
    storage_dir: StorageOption = None,
    database_url: UrlOption = None,
) -> None:
    """Copy the embedded database to a new file, while servers and jobs go on. Uploads and runs are not part of it."""
    with sentences():
        database = backups.database_path(_settings(storage_dir, database_url).effective_database_url, "pg_dump")
        size_bytes = backups.backup(database, to.absolute())
        print(f"{to}: {size_bytes:,} bytes, checked")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `posttrain db backup` made.")],
    storage_dir: StorageOption = None,
    database_url: UrlOption = None,
) -> None:
    """Put a backup of the embedded database back. Refused while a server or a job is running on the storage."""
    with sentences():
        settings = _settings(storage_dir, database_url)
        database = backups.database_path(settings.effective_database_url, "pg_restore or psql")
        settings.storage_dir.mkdir(parents=True, exist_ok=True)
        done = put_back(settings, database, source.absolute())
        print(f"the database is that of {source}")
        if done.before is not None:
            print(f"what it was before is kept in {done.before}")
        for path in done.set_aside:
            print(f"newer than the backup, moved to {path}")


def _settings(storage_dir: Path | None, database_url: str | None) -> Settings:
    told = {"storage_dir": None if storage_dir is None else str(storage_dir), "database_url": database_url}
    return read_settings({name: value for name, value in told.items() if value is not None})


@app.command()
def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed, the first hundred of a kind.")] = False,
    storage_dir: StorageOption = None,
    database_url: UrlOption = None,
) -> None:
    """Remove what has outlived its retention, as a server does from time to time by itself. Jobs kept by `keep` stay."""
    with sentences(), _engine(storage_dir, database_url) as engine:
        if not is_current(engine):
            raise StoreMismatch("the database has another schema than this build; run `posttrain db upgrade` first")
        sweeper = _sweeper(_settings(storage_dir, database_url), engine)
        try:
            if not dry_run and sweeper.leader.lease() is None:
                raise Conflict("a server is running, which sweeps by itself; use --dry-run to see what it would remove")
            swept = sweeper.outlook() if dry_run else sweeper.sweep()
        finally:
            sweeper.leader.release()
        did = "would remove" if dry_run else "removed"
        for kind, names in (("job", swept.jobs), ("file", swept.files), ("leftover", swept.leftovers)):
            for name in names:
                print(f"{did} {kind} {name}")
        print(f"{did} {len(swept.jobs)} jobs, {len(swept.files)} files, {len(swept.leftovers)} leftovers")


def _sweeper(settings: Settings, engine: Engine) -> Sweeper:
    clock = SystemClock()
    store = Store(engine, clock, busy_timeout_s=settings.database_busy_timeout_s)
    settings.jobs_dir.mkdir(parents=True, exist_ok=True)
    blobs = Blobs(settings.files_dir, max_bytes=settings.max_upload_bytes, reserve_bytes=settings.disk_reserve_bytes)
    leader = Leader(store, settings.storage_dir, settings.lease_ttl_s, one_host=engine.dialect.name == "sqlite")
    return Sweeper(settings, store, clock, blobs, leader)


def database_file(storage_dir: Path | None, database_url: str | None) -> Path | None:
    """The file of the database; None when a server keeps it."""
    url = make_url(_settings(storage_dir, database_url).effective_database_url)
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


@contextmanager
def opened(storage_dir: Path | None, database_url: str | None) -> Iterator[tuple[Settings, Engine, Store]]:
    """Settings, engine and store that a command on this machine works with."""
    settings = _settings(storage_dir, database_url)
    with _engine(storage_dir, database_url) as engine:
        yield settings, engine, Store(engine, SystemClock(), busy_timeout_s=settings.database_busy_timeout_s)


@contextmanager
def _engine(storage_dir: Path | None, database_url: str | None) -> Iterator[Engine]:
    settings = _settings(storage_dir, database_url)
    settings.storage_dir.mkdir(parents=True, exist_ok=True)
    engine = make_engine(settings.effective_database_url, busy_timeout_s=settings.database_busy_timeout_s)
    try:
        yield engine
    finally:
        engine.dispose()
