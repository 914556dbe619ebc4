"""Environments with the real packages of other projects, made once and kept in `.cache/clients`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

INSTALL_TIMEOUT_S = 900


@dataclass(frozen=True)
class Environment:
    """An interpreter, and the variables that it is started with."""

    python: str
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *argv: str, timeout_s: float = 120) -> str:
        """What a script printed; its failure is the test's."""
        ran = subprocess.run(
            [self.python, *argv], capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ | self.variables
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


def python312() -> str:
    """A Python 3.12, which newer packages need; skips where there is none."""
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob("3.12.*/bin/python"))
    candidates = [os.environ.get("PYTHON312"), *map(str, reversed(pyenv)), shutil.which("python3.12")]
    found = next(filter(_runs, candidates), None)
    if found is None:
        pytest.skip("no Python 3.12 here (PYTHON312, python3.12 on the path, or pyenv's): these packages need it")
    return found


def virtual(folder: Path, python: str, *requirements: str) -> Environment:
    """A virtual environment with the requirements; skips where they cannot be installed."""
    made = Environment(str(folder / "bin" / "python"))
    ready = folder / ".ready"
    if not ready.exists():
        _run([python, "-m", "venv", "--clear", str(folder)], folder.name)
        _run([made.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", *requirements], folder.name)
        ready.touch()
    return made


def over(base: Environment, folder: Path, *requirements: str) -> Environment:
    """The base with other versions of some packages before its own, these without what they need."""
    ready = folder / ".ready"
    if not ready.exists():
        options = ["-q", "--disable-pip-version-check", "--no-deps", "--no-compile", "--upgrade", "--target", str(folder)]
        _run([base.python, "-m", "pip", "install", *options, *requirements], folder.name)
        ready.touch()
    return Environment(base.python, {"PYTHONPATH": str(folder)})


def _runs(python: str | None) -> bool:
    """Whether it is there and is what its name says: pyenv leaves a python3.12 on the path that may only print a hint."""
    if python is None:
        return False
    argv = [python, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 12))"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def this_python() -> str:
    """The interpreter of these tests."""
    return sys.executable


def _run(argv: list[str], name: str) -> None:
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if ran.returncode != 0:
        pytest.skip(f"{name} cannot be installed here: {ran.stderr.strip()[-300:]}")
