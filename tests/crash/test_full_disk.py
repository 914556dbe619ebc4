"""A run that fills its disk still ends with a record, and can be stopped."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_trainer.contract import proc
from posttrain_trainer.contract.rundir import RunDir

FILLS = """
import os, signal, sys
signal.signal(15, lambda *_: sys.exit(5))
fd = os.open("filler", os.O_WRONLY | os.O_CREAT)
size = 65536
while size:
    try:
        while True: os.write(fd, b"x" * size)
    except OSError:
        size //= 2
try: os.write(1, b"y" * 8192)
except OSError: pass
signal.pause()
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, timeout=20
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=20)


def test_the_end_of_a_run_that_filled_its_disk_is_recorded(small_disk: Path, run: Any) -> None:
    run.run_dir = RunDir(small_disk / str(uuid.uuid4()))
    run.run_dir.path.mkdir()
    try:
        run.start(FILLS)
        run.until(lambda: is_full(small_disk))
        run.backend.stop(run.run_dir, 1, "cancel")
        end = run.exit()
        assert is_full(small_disk)
        assert (end["reason"], end["exit_code"], end["unkillable"]) == ("stopped", 5, 0)
        assert end["stop_want"] is None  # stop.json found no space; SIGTERM was the request
        assert run.look().problem is None
    finally:
        proc.kill_marked(run.run_id)


def is_full(folder: Path) -> bool:
    return os.statvfs(folder).f_bavail == 0
