"""Copies of the embedded database: made while servers write, checked, put back. PostgreSQL has its own tools for this."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url

from posttrain_service.errors import Conflict, InvalidRequest, InvalidSettings, NotFound
from posttrain_service.store.upgrade import known_revisions
from posttrain_trainer.contract.rundir import sync_folder

_PAGES = 1024
_BUSY_S = 30.0


def database_path(url: str, instead: str) -> Path:
    """The file of a SQLite database.

    Args:
        url: SQLAlchemy URL.
        instead: The tool of the other database that does what was asked for, e.g. pg_dump.

    Raises:
        InvalidSettings: It is another database.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        raise InvalidSettings(f"the database is {parsed.get_backend_name()}, which has its own tool for this: use {instead}")
    return Path(parsed.database or "")


def backup(database: Path, to: Path) -> int:
    """Copy the database as it is at one moment to a new file; servers may read and write meanwhile. Its size in bytes.

    Raises:
        NotFound: There is no database.
        Conflict: `to` exists; a backup never replaces anything.
    """
    if not database.is_file():
        raise NotFound(f"there is no database {database}")
    try:
        to.touch(mode=0o600, exist_ok=False)
    except FileExistsError as error:
        raise Conflict(f"{to} is there already; name a new file") from error
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        part.touch(mode=0o600)
        with closing(_open(database, "ro")) as source, closing(_open(part, "rw")) as target:
            source.backup(target)  # in one step: in several, it would begin anew with every commit of a server
            target.execute("PRAGMA journal_mode = DELETE")  # a backup is one file, with no log beside it
        check(part)
        _sync(part)
        part.replace(to)
        sync_folder(to.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        to.unlink(missing_ok=True)
        raise
    return to.stat().st_size


def check(path: Path) -> str | None:
    """That a file is a whole database of a schema that this build knows; its revision, None for an empty one.

    Raises:
        NotFound: There is no such file.
        InvalidRequest: It is no database, a damaged one, or one of a newer build.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
    try:
        with closing(_open(path, "ro")) as connection:
            verdict = [row[0] for row in connection.execute("PRAGMA integrity_check(5)")]
            if verdict != ["ok"]:
                raise InvalidRequest(f"{path} is damaged: {'; '.join(verdict)}")
            if (broken := connection.execute("PRAGMA foreign_key_check").fetchone()) is not None:
                raise InvalidRequest(f"{path} is damaged: rows of {broken[0]} refer to rows that are not there")
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "alembic_version" not in tables:
                if tables:
                    raise InvalidRequest(f"{path} is a database, but not one of posttrain")
                return None
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise InvalidRequest(f"{path} is no SQLite database, or a damaged one: {error}") from error
    if revision is not None and revision[0] not in known_revisions():
        raise InvalidRequest(f"{path} has schema {revision[0]}, which this build does not know; install a newer posttrain")
    return None if revision is None else str(revision[0])


def check_content(path: Path) -> None:
    """That a file is a backup worth putting back; errors as for `check`, and InvalidRequest for an empty database."""
    if check(path) is None:
        raise InvalidRequest(f"{path} is an empty database; name a file that `posttrain db backup` made")


def restore(database: Path, backup_file: Path) -> None:
    """Make the content of the database that of a checked backup, in one transaction: all of it, or nothing after a crash.

    The caller has seen to it that no server is running.

    Raises:
        Conflict: Somebody else has the database open for writing.
    """
    database.touch(mode=0o600)
    with closing(_open(backup_file, "ro")) as source, closing(_open(database, "rw")) as target:
        # Backup files have a rollback journal, ours a write-ahead log; the copy is into the log, so a crash undoes it.
        target.execute("PRAGMA journal_mode = WAL")
        try:
            source.backup(target, pages=_PAGES, sleep=0.05)
        except sqlite3.OperationalError as error:
            raise Conflict(f"the database is in use: {error}; stop whatever has it open") from error
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def known_ids(path: Path) -> tuple[set[str], set[str]]:
    """Run ids and file ids that a database file has rows of."""
    with closing(_open(path, "ro")) as connection:
        runs = {row[0] for row in connection.execute("SELECT run_id FROM jobs")}
        return runs, {row[0] for row in connection.execute("SELECT id FROM files")}


def _open(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_BUSY_S, isolation_level=None)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
