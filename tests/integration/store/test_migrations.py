"""The schema: up, down, current, kept with its rows, and no drift from the tables."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, Integer, inspect, text

from posttrain_service.domain.job import NewEvent
from posttrain_service.errors import StoreMismatch
from posttrain_service.store import upgrade as schema
from posttrain_service.store.engine import make_engine
from posttrain_service.store.store import Store
from posttrain_service.store.tables import metadata


@pytest.fixture
def engine(empty_url):
    made = make_engine(empty_url, busy_timeout_s=20)
    yield made
    made.dispose()


def tables(engine):
    return set(inspect(engine).get_table_names())


def test_up_down_and_up_again(engine):
    assert schema.current(engine) is None
    assert not schema.is_current(engine)
    assert schema.upgrade(engine)
    assert schema.is_current(engine)
    assert not schema.upgrade(engine), "a second time there is nothing to do"
    assert tables(engine) == {*metadata.tables, "alembic_version"}
    assert schema.downgrade(engine, "base")
    assert tables(engine) == {"alembic_version"}
    assert schema.upgrade(engine)


def test_migrations_make_what_the_tables_say(engine):
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    found = {
        (table, index["name"])
        for table in metadata.tables
        for index in inspect(engine).get_indexes(table)
        if "duplicates_constraint" not in index and not index["name"].startswith("sqlite_autoindex")
    }
    assert found == {(t.name, index.name) for t in metadata.tables.values() for index in t.indexes}


def test_many_servers_that_start_at_once_migrate_once(empty_url):
    engines = [make_engine(empty_url, busy_timeout_s=60) for _ in range(4)]
    barrier = threading.Barrier(len(engines))

    def start(engine):
        barrier.wait(20)
        return schema.upgrade(engine)

    with ThreadPoolExecutor(len(engines)) as pool:
        assert sorted(pool.map(start, engines)) == [False, False, False, True]
    for engine in engines:
        engine.dispose()


def test_a_database_of_a_newer_build_is_refused_and_left_alone(engine):
    schema.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert not schema.is_current(engine)
    with pytest.raises(StoreMismatch, match=r"9999.*newer posttrain"):
        schema.upgrade(engine)
    assert schema.current(engine) == "9999"


def test_rebuilding_a_parent_table_keeps_its_children(engine, make_job):
    """On SQLite a batch alter with foreign keys on deletes every event by cascade."""
    schema.upgrade(engine)
    store = Store(engine)
    job, _ = store.jobs.insert(make_job(metadata={"a": "b"}), NewEvent("queued", "q"))
    recreate = "always" if engine.dialect.name == "sqlite" else "never"

    def act(config, revision):
        context = MigrationContext.configure(config.attributes["connection"])
        with Operations.context(context), op.batch_alter_table("jobs", recreate=recreate) as batch:
            batch.add_column(Column("extra", Integer, nullable=True))

    schema._migrate(engine, "head", act)
    assert "extra" in {column["name"] for column in inspect(engine).get_columns("jobs")}
    assert len(store.events.page(job.job_uuid).data) == 1
    assert store.jobs.page(metadata={"a": "b"}).data == [job]


def test_a_migration_that_fails_changes_nothing(engine, make_job):
    schema.upgrade(engine)
    before = tables(engine)

    def act(config, revision):
        config.attributes["connection"].execute(text("CREATE TABLE half (x INTEGER)"))
        raise RuntimeError("broken migration")

    with pytest.raises(RuntimeError, match="broken"):
        schema._migrate(engine, "head", act)
    assert tables(engine) == before
    assert schema.is_current(engine)


def test_foreign_keys_hold_before_and_after_a_migration(engine, make_job):
    schema.upgrade(engine)
    store = Store(engine)
    for _ in range(2):
        with pytest.raises(Exception, match=r"(?i)foreign key"), store.database.write() as connection:
            connection.execute(text("INSERT INTO job_files (run_id, file_id) VALUES ('nobody', 'x')"))
        schema.upgrade(engine)


def test_a_migration_that_breaks_references_is_rolled_back(engine, make_job):
    if engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL checks references itself")
    schema.upgrade(engine)
    store = Store(engine)
    job, _ = store.jobs.insert(make_job(), NewEvent("queued", "q"))

    def act(config, revision):
        config.attributes["connection"].execute(text("DELETE FROM jobs"))

    with pytest.raises(StoreMismatch, match="rows of events without"):
        schema._migrate(engine, "head", act)
    assert store.jobs.get_run(job.run_id) == job


def test_the_command_line_of_alembic_sees_no_drift(tmp_path, repository):
    run = [sys.executable, "-m", "alembic"]
    env = {"POSTTRAIN_STORAGE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for command in (["upgrade", "head"], ["check"], ["downgrade", "base"]):
        done = subprocess.run([*run, *command], cwd=repository, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
