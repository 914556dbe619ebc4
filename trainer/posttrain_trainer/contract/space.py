"""Disk space that a run leaves free: asked before a checkpoint is written, so that a full disk costs a pause and no run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ENV_DISK_RESERVE = "POSTTRAIN_DISK_RESERVE_BYTES"
"""Free space that a run must leave untouched; the launcher sets it. Without it the reserve is 0."""


def shortage(folder: Path, need_bytes: int) -> str | None:
    """Why `need_bytes` more can't be written to the disk of `folder`, in a sentence; None when they can."""
    reserve = int(os.environ.get(ENV_DISK_RESERVE, 0))
    free = shutil.disk_usage(folder).free
    if need_bytes <= free - reserve:
        return None
    return (
        f"a checkpoint needs about {need_bytes:,} bytes, but {free:,} are free and {reserve:,} of them must stay free; "
        "free some space, then resume"
    )
