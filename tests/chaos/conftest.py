"""The chaos rounds as tests: the modules beside this file are imported by their names, as `python tests/chaos` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from chaos_lab import Lab


@pytest.fixture(scope="session")
def chaos_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One server for all rounds; those that kill it start it again."""
    from chaos_lab import Lab

    lab = Lab(tmp_path_factory.mktemp("chaos"))
    lab.server.start()
    yield lab
    lab.close()
