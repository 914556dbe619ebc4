"""Engines, transactions, and what database errors become."""

import os
import sqlite3
import stat
import threading

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from posttrain_service.errors import DiskFull, InvalidSettings, ServiceError, StoreBusy, Unavailable
from posttrain_service.store.engine import Database, make_engine, translate
from posttrain_service.store.store import Store


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'a.db'}"


@pytest.fixture
def open_database(sqlite_url):
    opened = []

    def open_(**options):
        opened.append(make_engine(sqlite_url, **options))
        return Database(opened[-1], **options)

    yield open_
    for engine in opened:
        engine.dispose()


def pragma(connection, name):
    return connection.execute(text(f"PRAGMA {name}")).scalar_one()


def test_sqlite_is_set_up_on_every_connection(open_database):
    database = open_database(busy_timeout_s=7)
    with database.read() as one, database.read() as two:
        for connection in (one, two):
            assert pragma(connection, "journal_mode") == "wal"
            assert pragma(connection, "synchronous") == 2, "FULL: an accepted job survives power loss"
            assert pragma(connection, "foreign_keys") == 1
            assert pragma(connection, "busy_timeout") == 7000


def test_the_database_is_its_owners_alone(open_database, tmp_path):
    old = os.umask(0)
    try:
        with open_database().write() as connection:
            connection.execute(text("CREATE TABLE t (x INTEGER)"))
            files = sorted(path.name for path in tmp_path.iterdir())
            modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(old)
    assert files == ["a.db", "a.db-shm", "a.db-wal"]
    assert modes == {0o600}


def test_a_write_that_reads_first_is_not_beaten_by_another_writer(open_database):
    """With a deferred transaction the second writer fails at once, whatever its busy timeout."""
    first, second = open_database(busy_timeout_s=10), open_database(busy_timeout_s=10)
    with first.write() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))
        connection.execute(text("INSERT INTO t VALUES (0)"))

    def count_up(database, times):
        for _ in range(times):
            with database.write() as connection:
                value = connection.execute(text("SELECT x FROM t")).scalar_one()
                connection.execute(text("UPDATE t SET x = :x"), {"x": value + 1})

    threads = [threading.Thread(target=count_up, args=(database, 50)) for database in (first, second, first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with first.read() as connection:
        assert connection.execute(text("SELECT x FROM t")).scalar_one() == 150


def test_another_process_that_holds_the_lock_makes_it_busy(open_database, tmp_path):
    database = open_database(busy_timeout_s=0.05)
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    with database.read():  # it works, whoever writes
        pass
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="locked") as caught, database.write():
        pass
    assert caught.value.should_retry
    assert caught.value.retry_after_s == 1.0
    other.execute("ROLLBACK")
    other.close()
    with database.write() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))


def test_a_thread_that_waits_too_long_for_its_turn_is_told_busy_and_the_next_is_served(open_database):
    database = open_database(busy_timeout_s=0.05)
    with database.write(), pytest.raises(StoreBusy, match=r"busy for 0.05 s"), database.write():
        pass
    with database.write() as connection:
        connection.execute(text("CREATE TABLE t (x INTEGER)"))


def test_what_an_exception_leaves_is_rolled_back(open_database):
    database = open_database()

    def write_and_fail():
        with database.write() as connection:
            connection.execute(text("CREATE TABLE t (x INTEGER)"))
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar_one() == 0


def test_a_full_database_is_a_full_disk(open_database):
    database = open_database()

    def write_much():
        with database.write() as connection:
            connection.execute(text("PRAGMA max_page_count = 8"))
            connection.execute(text("CREATE TABLE t (x BLOB)"))
            connection.execute(text("INSERT INTO t VALUES (zeroblob(1000000))"))

    with pytest.raises(DiskFull, match="free some space"):
        write_much()


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [("40P01", StoreBusy), ("40001", StoreBusy), ("53300", StoreBusy), ("53100", DiskFull), ("08006", Unavailable),
     ("57P01", Unavailable), (None, Unavailable), ("42P01", None)],
)  # fmt: skip
def test_what_postgresql_says(sqlstate, kind):
    class Said(Exception):
        pass

    said = Said()
    said.sqlstate = sqlstate
    known = translate(OperationalError("SELECT 1", {}, said))
    assert known is None if kind is None else type(known) is kind


def test_an_unreachable_server_is_unavailable():
    pytest.importorskip("psycopg")
    engine = make_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with pytest.raises(Unavailable, match="cannot be reached"), Database(engine).read():
        pass


@pytest.mark.parametrize(
    ("url", "text_"),
    [("sqlite://", "in memory"), ("sqlite:///:memory:", "in memory"), ("mysql://h/secret", "mysql"), ("://pw", "not a database URL"),
     ("sqlite:////no/such/folder/a.db", "No such file")],
)  # fmt: skip
def test_urls_that_cannot_be_used(url, text_):
    with pytest.raises((InvalidSettings, ServiceError), match=text_) as caught:
        make_engine(url)
    assert "pw" not in caught.value.message


def test_health_check_writes(store):
    store.check_writable()


def test_health_check_sees_a_database_without_schema(open_database, sqlite_url):
    engine = make_engine(sqlite_url)
    with pytest.raises(OperationalError, match="no such table"):
        Store(engine).check_writable()
    engine.dispose()
