"""A store on SQLite and, where this machine has PostgreSQL, on a server of our own that ends with the tests.

POSTTRAIN_TEST_POSTGRES_URL names another server to use (a database that may be created and dropped on).
"""

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from posttrain_service.clock import ManualClock
from posttrain_service.domain.files import UploadedFile
from posttrain_service.domain.job import Job, NewEvent
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.ids import new_file_id, new_run_id
from posttrain_service.store.engine import make_engine
from posttrain_service.store.store import Store
from posttrain_service.store.upgrade import upgrade

GIVEN_SERVER = os.environ.get("POSTTRAIN_TEST_POSTGRES_URL")
_numbers = itertools.count()


def find_program(name: str) -> str | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name) or next((str(f / name) for f in folders if (f / name).is_file()), None)


@pytest.fixture(scope="session")
def postgres_server():
    """URL of a PostgreSQL server; skips with the reason where there is none."""
    pytest.importorskip("psycopg", reason="no PostgreSQL driver: install posttrain[postgres]")
    if GIVEN_SERVER is not None:
        yield GIVEN_SERVER
        return
    initdb, postgres = find_program("initdb"), find_program("postgres")
    if initdb is None or postgres is None:
        pytest.skip("no PostgreSQL server: neither POSTTRAIN_TEST_POSTGRES_URL nor initdb and postgres are there")
    folder = Path(tempfile.mkdtemp(prefix="posttrain-pg-"))
    who = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        user = pwd.getpwnam("nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    quiet = {"cwd": folder, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, **who}
    data = folder / "data"
    made = subprocess.run(
        [initdb, "-D", data, "-U", "posttrain", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "-N"],
        stdout=subprocess.PIPE, text=True, **quiet,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [postgres, "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=80"],
            stdout=log, **quiet,
        )  # fmt: skip
    try:
        url = f"postgresql+psycopg://posttrain@/postgres?host={folder}"
        await_server(url, server, folder / "log")
        yield url
    finally:
        server.send_signal(3)  # SIGQUIT: at once, without a checkpoint
        server.wait(30)
        shutil.rmtree(folder)


def await_server(url: str, server: subprocess.Popen, log: Path) -> None:
    import time

    import psycopg

    for _ in range(300):
        assert server.poll() is None, log.read_text()
        try:
            psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(False)).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)  # a process that starts has nothing else to wait on
    raise AssertionError(log.read_text())


@contextmanager
def postgres_database(server: str, template: str = "template1"):
    """URL of a new database on the server, dropped at the end."""
    name = f"posttrain_test_{os.getpid()}_{next(_numbers)}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield make_url(server).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


def upgrade_once(url: str) -> None:
    engine = make_engine(url)
    upgrade(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def ready_sqlite(tmp_path_factory):
    """A database file with the current schema, to be copied."""
    path = tmp_path_factory.mktemp("ready") / "posttrain.db"
    upgrade_once(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def ready_postgres(postgres_server):
    """Name of a database with the current schema, to be used as a template."""
    with postgres_database(postgres_server) as url:
        upgrade_once(url)
        yield make_url(url).database


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path):
    """URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'posttrain.db'}"
        return
    with postgres_database(request.getfixturevalue("postgres_server")) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """URL of a database with the current schema and no rows."""
    if request.param == "sqlite":
        path = tmp_path / "posttrain.db"
        shutil.copy(request.getfixturevalue("ready_sqlite"), path)
        yield f"sqlite:///{path}"
        return
    server, template = request.getfixturevalue("postgres_server"), request.getfixturevalue("ready_postgres")
    with postgres_database(server, template) as url:
        yield url


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def open_store(database_url, clock):
    """Opens the same database again and again, as servers that are restarted or run side by side do."""
    opened = []

    def open_() -> Store:
        engine = make_engine(database_url, busy_timeout_s=10)
        opened.append(Store(engine, clock, busy_timeout_s=10))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def make_job(clock):
    def make(**fields) -> Job:
        run_id = new_run_id()
        base = {
            "run_id": run_id, "job_uuid": run_id, "owner": "default", "state": JobState.QUEUED, "method": "sft",
            "model": "m", "spec": {"model": "m"}, "body_digest": "d" * 64, "created_at": clock.advance(1.0),
        }  # fmt: skip
        return Job(**base | fields)

    return make


@pytest.fixture
def add(store, make_job):
    """Stores a new job."""

    def add_(**fields) -> Job:
        job, new = store.jobs.insert(make_job(**fields), NewEvent("queued", "queued"))
        assert new
        return job

    return add_


@pytest.fixture
def add_file(store, clock):
    def add_(**fields) -> UploadedFile:
        base = {
            "id": new_file_id(), "owner": "default", "filename": "a.jsonl", "purpose": "fine-tune", "size_bytes": 3,
            "sha256": "0" * 64, "created_at": clock.advance(1.0),
        }  # fmt: skip
        file, new = store.files.insert(UploadedFile(**base | fields))
        assert new
        return file

    return add_


@pytest.fixture
def bring(store):
    """Brings a job to a state along the table of moves."""

    def bring_(job: Job, *states: str) -> Job:
        for state in states:
            changes = {"attempt": job.attempt + 1} if state == "launching" else {}
            moved = store.jobs.move(job.run_id, {job.state}, JobState(state), changes=changes, event=NewEvent(state, state))
            assert moved is not None
            job = moved
        return job

    return bring_
