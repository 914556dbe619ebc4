"""`posttrain db ...`: the database's schema, on the machine that has the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import Engine

from posttrain_service.cli.common import sentences
from posttrain_service.cli.serve import read_settings
from posttrain_service.store.engine import make_engine
from posttrain_service.store.upgrade import current, head, is_current
from posttrain_service.store.upgrade import upgrade as bring_up_to_date

app = typer.Typer(help="Look after the database's schema.", no_args_is_help=True)

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


@contextmanager
def _engine(storage_dir: Path | None, database_url: str | None) -> Iterator[Engine]:
    told = {"storage_dir": None if storage_dir is None else str(storage_dir), "database_url": database_url}
    settings = read_settings({name: value for name, value in told.items() if value is not None})
    settings.storage_dir.mkdir(parents=True, exist_ok=True)
    engine = make_engine(settings.effective_database_url, busy_timeout_s=settings.database_busy_timeout_s)
    try:
        yield engine
    finally:
        engine.dispose()
