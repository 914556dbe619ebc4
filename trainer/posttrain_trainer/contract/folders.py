"""Removing folders that somebody else may be removing at the same time."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

TRASH = ".trash-"
"""How a folder that is being removed is called first, so that nobody ever finds half of it under its own name."""

_MOST_TIMES = 20


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it; what has vanished already is no fault, whoever removed it.

    A folder whose content another renames to its trash meanwhile is not seen whole and is not empty then: it is looked
    through again.

    Raises:
        OSError: Something in it cannot be removed.
    """
    for further in reversed(range(_MOST_TIMES)):
        try:
            return shutil.rmtree(folder, onerror=_unless_vanished)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not further:
                raise


def _unless_vanished(function: Any, path: str, fault: Any) -> None:
    error = fault[1]
    if not isinstance(error, FileNotFoundError):
        raise error
