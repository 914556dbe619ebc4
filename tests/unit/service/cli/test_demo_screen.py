"""What the demo tells people to type works in their shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from posttrain_service.cli.demo_screen import own_command


def test_the_command_is_named_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    (tmp_path / ".venv" / "lib").mkdir()
    for path in (scripts / "posttrain", tmp_path / "posttrain"):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # another posttrain
    assert own_command() == ".venv/bin/posttrain"
    monkeypatch.chdir(scripts.parent / "lib")
    assert own_command() == str(scripts / "posttrain")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{tmp_path}")
    assert own_command() == "posttrain"
