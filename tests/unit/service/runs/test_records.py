"""Records that are kept are those that the files hold now."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from posttrain_service.runs import records
from posttrain_service.runs.records import Records
from posttrain_trainer.contract.rundir import write_json


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were opened."""
    names: list[str] = []
    real = records.read_json

    def read_json(path: Path):
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(records, "read_json", read_json)
    return names


def test_an_unchanged_file_is_opened_once(tmp_path: Path, reads: list[str]) -> None:
    kept, path = Records(), tmp_path / "run.json"
    write_json(path, {"attempt": 1})
    assert [kept.read(path), kept.read(path)] == [{"attempt": 1}] * 2
    assert reads == ["run.json"]


def test_what_is_written_anew_is_read_anew(tmp_path: Path, reads: list[str]) -> None:
    kept, path = Records(), tmp_path / "heartbeat.json"
    for number in range(50):  # the same length, at once after one another
        write_json(path, {"n": number + 100})
        assert kept.read(path) == {"n": number + 100}
    path.write_text('{"n":999}')  # in place
    assert kept.read(path) == {"n": 999}
    assert len(reads) == 51


def test_a_file_that_went_is_gone(tmp_path: Path) -> None:
    kept, path = Records(), tmp_path / "run.json"
    assert kept.read(path) is None
    write_json(path, {"attempt": 1})
    assert kept.read(path) == {"attempt": 1}
    path.unlink()
    assert kept.read(path) is None
    assert kept.read(path / "below") is None
    write_json(path, {"attempt": 2})
    assert kept.read(path) == {"attempt": 2}


def test_a_link_is_not_taken_for_the_record_that_was_there(tmp_path: Path) -> None:
    kept, path = Records(), tmp_path / "run.json"
    write_json(path, {"attempt": 1})
    assert kept.read(path) == {"attempt": 1}
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")  # the very same inode behind it
    with pytest.raises(ValueError, match="not a regular file"):
        kept.read(path)


def test_what_cannot_be_read_is_asked_for_again(tmp_path: Path) -> None:
    kept, path = Records(), tmp_path / "run.json"
    path.write_text("{torn")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"run\.json"):
            kept.read(path)
    os.truncate(path, 0)
    path.write_text(json.dumps({"attempt": 3}))
    assert kept.read(path) == {"attempt": 3}


def test_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]) -> None:
    monkeypatch.setattr(records, "MOST", 2)
    kept = Records()
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for number, path in enumerate(paths):
        write_json(path, number)
    for path in (paths[0], paths[1], paths[0], paths[2], paths[0], paths[1]):
        assert kept.read(path) == int(path.stem)
    assert reads == ["0.json", "1.json", "2.json", "1.json"]  # the one that was not asked for for longest went first
