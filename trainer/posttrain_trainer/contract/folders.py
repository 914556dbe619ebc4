"""Removing folders that somebody else may be removing at the same time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

TRASH = ".trash-"
"""How a folder that is being removed is called first, so that nobody ever finds half of it under its own name."""


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it; what has vanished already is no fault, whoever removed it.

    Raises:
        OSError: Something in it cannot be removed.
    """
    shutil.rmtree(folder, onerror=_unless_vanished)


def _unless_vanished(function: Any, path: str, fault: Any) -> None:
    error = fault[1]
    if not isinstance(error, FileNotFoundError):
        raise error
