"""A store on SQLite and on PostgreSQL (see `tests/postgres_server.py`)."""

import shutil

import pytest
from postgres_server import postgres_database, upgrade_once

from posttrain_service.clock import ManualClock
from posttrain_service.domain.files import UploadedFile
from posttrain_service.domain.job import Job, NewEvent
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.ids import new_file_id, new_run_id
from posttrain_service.store.engine import make_engine
from posttrain_service.store.store import Store


@pytest.fixture(scope="session")
def ready_sqlite(tmp_path_factory):
    """A database file with the current schema, to be copied."""
    path = tmp_path_factory.mktemp("ready") / "posttrain.db"
    upgrade_once(f"sqlite:///{path}")
    return path


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
    yield request.getfixturevalue("postgres_url")


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
