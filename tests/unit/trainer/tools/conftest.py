"""A tiny model and rows for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain_trainer.testing import tiny_model, tiny_rows, write_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tools") / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", tiny_rows(20))
