"""Who may import whom: the contracts of pyproject.toml, run through import-linter's own interface."""

from __future__ import annotations

from pathlib import Path

import pytest
from importlinter.application.use_cases import SUCCESS, lint_imports
from importlinter.configuration import configure


def test_import_contracts_hold(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    monkeypatch.chdir(repository)
    kept = lint_imports(config_filename=str(repository / "pyproject.toml"), cache_dir=None)
    assert kept == SUCCESS, capsys.readouterr().out
