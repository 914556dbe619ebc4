"""`posttrain db`: upgrade an empty database, say where it is, and see one that is behind."""

from __future__ import annotations

import io
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from posttrain_service.cli.main import app
from posttrain_service.compose import Runtime, build
from posttrain_service.ids import new_run_id
from posttrain_service.settings import Settings
from posttrain_service.store.engine import make_engine
from posttrain_service.store.upgrade import downgrade, head
from posttrain_trainer.contract.locks import hold
from posttrain_trainer.contract.rundir import RunDir

ROW = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["db", *arguments])
    return result.exit_code, result.output


def test_an_empty_database_is_upgraded_once(tmp_path: Path) -> None:
    place = ("--storage-dir", str(tmp_path / "storage"))
    assert call("check", *place) == (1, f"database: empty; this build: {head()}\n")
    assert call("upgrade", *place) == (0, f"empty -> {head()}\n")
    assert call("upgrade", *place) == (0, f"already at {head()}\n")
    assert call("check", *place) == (0, f"database: {head()}; this build: {head()}\n")


def test_a_database_that_was_taken_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    monkeypatch.setenv("POSTTRAIN_STORAGE_DIR", str(tmp_path))
    assert call("upgrade", "--database-url", url)[0] == 0
    engine = make_engine(url)
    downgrade(engine, "base")
    engine.dispose()
    assert call("check", "--database-url", url)[0] == 1


def test_a_url_of_another_database_is_one_sentence(tmp_path: Path) -> None:
    code, output = call("upgrade", "--storage-dir", str(tmp_path), "--database-url", "mysql://u:secret@h/d")
    assert code == 1
    assert "use sqlite:///PATH or postgresql+psycopg://" in output
    assert "secret" not in output


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Runtime]:
    """A service with an upload, whose loops a test starts itself."""
    runtime = build(Settings(storage_dir=tmp_path / "storage", disk_reserve_bytes=0), slots=("cpu:0",))
    runtime.services.files.create(io.BytesIO(ROW), filename="kept.jsonl", purpose="fine-tune")
    yield runtime
    runtime.stop()


def names(runtime: Runtime) -> set[str]:
    return {file.filename for file in runtime.store.files.page().data}


def test_a_backup_is_made_while_a_server_writes_and_put_back_when_it_has_ended(server: Runtime, tmp_path: Path) -> None:
    place = ("--storage-dir", str(tmp_path / "storage"))
    copy = tmp_path / "copy.db"
    assert server.leader.lease() is not None
    with server.store.database.write() as connection:  # a writer in the middle of its work neither waits nor shows
        connection.execute(text("DELETE FROM files"))
        code, output = call("backup", str(copy), *place)
        connection.rollback()
    assert code == 0, output
    assert copy.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == ["copy.db"]
    assert call("backup", str(copy), *place)[1] == f"error: {copy} is there already; name a new file\n"

    newer = server.services.files.create(io.BytesIO(ROW), filename="newer.jsonl", purpose="fine-tune")
    run = server.settings.jobs_dir / new_run_id()
    (run / "data").mkdir(parents=True)
    code, output = call("restore", str(copy), *place)
    assert (code, output) == (1, "error: a server is running on this storage directory; stop it first\n")
    server.stop()
    attempt = RunDir(run).attempt(1)
    attempt.path.mkdir(parents=True)
    with hold(attempt.shim_lock):
        assert "is still training" in call("restore", str(copy), *place)[1]
    code, output = call("restore", str(copy), *place)
    assert code == 0, output

    again = build(server.settings, slots=("cpu:0",))
    assert names(again) == {"kept.jsonl"}
    again.sweeper.sweep()
    again.stop()
    aside = sorted(path.name for path in (tmp_path / "storage" / "set-aside").glob("*/*"))
    assert aside == sorted([newer.id, run.name])  # newer than the backup: no sweeper may take it for a leftover
    [before] = (tmp_path / "storage").glob("posttrain.db.before-restore-*")
    assert call("restore", str(before), *place)[0] == 0
    once_more = build(server.settings, slots=("cpu:0",))
    assert names(once_more) == {"kept.jsonl", "newer.jsonl"}
    once_more.stop()


@pytest.mark.parametrize("damage", ["missing", "text", "empty", "foreign", "torn", "newer"])
def test_what_is_no_backup_is_refused_and_changes_nothing(server: Runtime, tmp_path: Path, damage: str) -> None:
    place = ("--storage-dir", str(tmp_path / "storage"))
    copy = tmp_path / "copy.db"
    assert call("backup", str(copy), *place)[0] == 0
    if damage == "missing":
        copy.unlink()
    elif damage == "text":
        copy.write_text("no database " * 1000)
    elif damage == "empty":
        copy.write_bytes(b"")
    elif damage == "torn":
        copy.write_bytes(copy.read_bytes()[:-20_000])
    else:
        with closing(sqlite3.connect(copy)) as connection:
            change = "DROP TABLE alembic_version" if damage == "foreign" else "UPDATE alembic_version SET version_num = 'x'"
            connection.execute(change)
            connection.commit()
    server.stop()
    code, output = call("restore", str(copy), *place)
    assert (code, output.count("\n"), output[:7]) == (1, 1, "error: ")
    again = build(server.settings, slots=("cpu:0",))
    assert names(again) == {"kept.jsonl"}
    again.stop()


def test_postgresqls_own_tools_are_named(tmp_path: Path) -> None:
    url = ("--database-url", "postgresql+psycopg://u:secret@h/d", "--storage-dir", str(tmp_path))
    assert call("backup", "x", *url) == (1, "error: the database is postgresql, which has its own tool for this: use pg_dump\n")
    assert "use pg_restore or psql" in call("restore", "x", *url)[1]


def test_a_sweep_by_hand_says_what_it_removes_and_leaves_it_to_a_server_that_runs(server: Runtime, tmp_path: Path) -> None:
    place = ("--storage-dir", str(tmp_path / "storage"))
    run = server.settings.jobs_dir / new_run_id()
    run.mkdir()
    os.utime(run, (0, 0))
    assert call("sweep", "--dry-run", *place) == (0, f"would remove leftover {run.name}\nwould remove 0 jobs, 0 files, 1 leftovers\n")
    assert server.leader.lease() is not None
    code, output = call("sweep", *place)
    assert (code, run.exists()) == (1, True)
    assert "a server is running, which sweeps by itself" in output
    server.stop()
    assert call("sweep", *place) == (0, f"removed leftover {run.name}\nremoved 0 jobs, 0 files, 1 leftovers\n")
    assert not run.exists()


def test_the_doctor_makes_nothing_where_no_service_has_been(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--storage-dir", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "no service has been here" in result.output
    assert "--storage-dir" in result.output
    assert not (tmp_path / "nowhere").exists()


def test_the_doctor_of_a_fresh_storage_misses_a_server_and_an_interpreter(server: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_TRAINER_PYTHON", "/no/such/python")
    monkeypatch.setenv("POSTTRAIN_DISK_RESERVE_BYTES", "0")
    result = CliRunner().invoke(app, ["doctor", "--storage-dir", str(tmp_path / "storage")])
    first, second = result.output.splitlines()
    assert result.exit_code == 1
    assert first.startswith("error: trainer: /no/such/python is not there")
    assert second.startswith("warning: server: no server is acting")
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--storage-dir", str(tmp_path / "storage")]).stdout)
    assert [f"{one['level']}: {one['about']}: {one['message']}" for one in told] == result.stdout.splitlines()
    result = CliRunner().invoke(app, ["doctor", "nobody", "--storage-dir", str(tmp_path / "storage")])
    assert (result.exit_code, result.output) == (1, "error: there is no job nobody\n")
