"""Engines and transactions: SQLite's pragmas, BEGIN IMMEDIATE for writers, and database errors as `ServiceError`s.

Transactions are short and hold no I/O but the database's own; the one exception is a rename, in `JobRows.while_ended`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from posttrain_service.errors import DiskFull, InvalidSettings, ServiceError, StoreBusy, Unavailable

_WRITE = "posttrain_write"
_PG_BUSY = frozenset({"40001", "40P01", "55P03", "53300"})  # serialization, deadlock, lock timeout, too many connections


class Database:
    """An engine and its two kinds of transaction."""

    def __init__(self, engine: Engine, *, busy_timeout_s: float = 30.0) -> None:
        self.engine = engine
        self._writer = engine.execution_options(**{_WRITE: True})
        self._busy_timeout_s = busy_timeout_s
        # SQLite admits one writer; its busy handler polls, which is unfair under load. Queueing the threads of this
        # process first costs nothing and is no source of truth: other processes still meet BEGIN IMMEDIATE.
        self._turn = _Turn() if engine.dialect.name == "sqlite" else None

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading; what is read is one consistent picture on SQLite.

        Raises:
            ServiceError: StoreBusy, Unavailable or DiskFull for what the database says.
        """
        with _translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection inside a transaction that commits at the end, or rolls back when an exception leaves.

        Raises:
            ServiceError: StoreBusy, Unavailable or DiskFull for what the database says.
        """
        with _translated(), self._turn_taken(), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def _turn_taken(self) -> Iterator[None]:
        if self._turn is None:
            yield
            return
        if not self._turn.take(self._busy_timeout_s):
            raise StoreBusy(f"the database was busy for {self._busy_timeout_s:g} s; try again")
        try:
            yield
        finally:
            self._turn.give()


class _Turn:
    """A lock that serves threads in the order in which they came; `threading.Lock` lets some starve."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def take(self, timeout_s: float) -> bool:
        """Wait for the turn; False when it did not come in time."""
        ticket = threading.Lock()
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return True
            ticket.acquire()
            self._waiting.append(ticket)
        if ticket.acquire(timeout=timeout_s):
            return True
        with self._mutex:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return False
        return True  # it came just now

    def give(self) -> None:
        """Pass the turn to the thread that has waited longest."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


def make_engine(url: str, *, busy_timeout_s: float = 30.0) -> Engine:
    """An engine for a SQLite file or a PostgreSQL server; the file's folder must exist.

    Raises:
        InvalidSettings: The URL can't be read, names another database or one in memory (which threads can't share),
            or a file that cannot be written.
    """
    try:
        parsed = make_url(url)
    except Exception as error:  # ValueError as well as SQLAlchemy's own; none may show the URL
        raise InvalidSettings("database_url is not a database URL; see the documentation of POSTTRAIN_DATABASE_URL") from error
    options: dict[str, Any] = {"json_serializer": dump_json, "pool_timeout": busy_timeout_s}
    if parsed.get_backend_name() == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise InvalidSettings("database_url names a SQLite database in memory; use a file")
        _create_private(parsed.database or "")
        engine = create_engine(parsed, pool_size=8, max_overflow=56, **options)
        _prepare_sqlite(engine, busy_timeout_s)
        return engine
    if parsed.get_backend_name() == "postgresql":
        return create_engine(parsed, pool_size=8, max_overflow=24, pool_pre_ping=True, **options)
    raise InvalidSettings(f"database_url names {parsed.get_backend_name()!r}; use sqlite or postgresql+psycopg")


def dump_json(value: Any) -> str:
    """JSON text for a column; NaN and infinities are refused, since PostgreSQL and the API have none."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _prepare_sqlite(engine: Engine, busy_timeout_s: float) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, record: Any) -> None:
        # Python's own transaction control emits no BEGIN for SELECT, so a read and the update after it are two
        # transactions (measured: 315 claims of 101 jobs). We begin ourselves, below.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {int(busy_timeout_s * 1000)}")
        connection.execute("PRAGMA journal_mode = WAL")
        # FULL, not NORMAL: a job that was answered with 201 must survive power loss, and thousands of commits a
        # second are far more than the store needs.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        # A DEFERRED transaction that reads before it writes fails at once when another one committed between.
        writes = connection.get_execution_options().get(_WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except PoolTimeout as error:
        raise StoreBusy("all database connections are in use; try again") from error
    except (OperationalError, InternalError) as error:
        known = translate(error)
        if known is None:
            raise
        raise known from error


def translate(error: DBAPIError) -> ServiceError | None:
    """What a database error means for the caller; None for one that means a defect."""
    name = getattr(error.orig, "sqlite_errorname", None) or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreBusy("the database is locked by another writer; try again")
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
        return DiskFull("the database cannot be written: the disk is full or failing; free some space")
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
        return Unavailable("the database file cannot be opened for writing; check the storage directory's permissions")
    state = getattr(error.orig, "sqlstate", None)
    if state in _PG_BUSY:
        return StoreBusy("the database is busy; try again")
    if state == "53100":
        return DiskFull("the database server's disk is full; free some space")
    if not name and (error.connection_invalidated or state is None or state.startswith(("08", "57P"))):
        return Unavailable("the database server cannot be reached; try again")
    return None


def _create_private(path: str) -> None:
    # SQLite's own -wal and -shm files take over the mode of the database: specs and labels are their owner's alone.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise InvalidSettings(f"the database file {path} cannot be opened for writing: {error.strerror}") from error
