"""Removing folders that somebody else is working in."""

import os

import pytest

from posttrain_trainer.contract.folders import remove_tree


def refilled(monkeypatch, folder, times):
    """Put something into `folder` each time that it is about to be removed, at most `times`."""
    real, left = os.rmdir, list(range(times))

    def rmdir(path, **options):
        if path == folder.name and left:
            (folder / f"moved-{left.pop()}").mkdir()
        return real(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)


def test_what_comes_in_while_a_folder_is_removed_goes_with_it(tmp_path, monkeypatch):
    """A checkpoint that another renames to its trash may be seen by no look through its folder."""
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-000001").mkdir(parents=True)
    refilled(monkeypatch, checkpoints, 3)
    remove_tree(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_filled_for_ever_is_a_fault(tmp_path, monkeypatch):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    refilled(monkeypatch, checkpoints, 1000)
    with pytest.raises(OSError, match="not empty"):
        remove_tree(tmp_path / "run")
