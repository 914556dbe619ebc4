"""`posttrain db`: upgrade an empty database, say where it is, and see one that is behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain_service.cli.main import app
from posttrain_service.store.engine import make_engine
from posttrain_service.store.upgrade import downgrade, head


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
