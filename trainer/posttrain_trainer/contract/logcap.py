"""Logs that stay below a quota: older output is dropped from the file that processes go on appending to.

The file cannot be renamed away, since ranks and their children hold it open; so its last part is moved to its beginning,
behind a marker, and the rest is cut off. The marker says how many bytes of the whole log came before, so positions in the
whole log stay what they were and a reader goes on where it was. Writers open with O_APPEND and take no lock; readers and
`cap` exclude each other by a lock on the file itself. Standard library only: the shim does this.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

from posttrain_trainer.contract.plainfile import open_contained

ENV_LOG_QUOTA = "POSTTRAIN_LOG_QUOTA_BYTES"
"""Most bytes of each log of a run; the launcher sets it for its shim."""
KEPT = 4
"""One part in so many of the quota stays."""
HEAD_BYTES = 200
"""At least the length of a marker."""

_MARKER = re.compile(rb"\[posttrain [0-9TZ:-]{20}\] older output was dropped here: the quota of a log is \d{1,18} bytes; byte (\d{1,18}) follows\n")
_LONGEST_LINE = 65536
_BLOCK = 1 << 20
_TRIES = 200


def shift(head: bytes) -> tuple[int, int]:
    """How positions in the whole log and in the file differ.

    Args:
        head: The first HEAD_BYTES of the file.

    Returns:
        What to add to a position in the file, and the length of the marker at its beginning; zeros without one.
    """
    match = _MARKER.match(head)
    return (0, 0) if match is None else (int(match[1]) - match.end(), match.end())


def cap(path: Path, quota_bytes: int) -> int:
    """Drop the older part of a log that has more than `quota_bytes`; how many bytes were dropped.

    What a writer appends within the microseconds between the last look at the size and the cut is lost, too.

    Raises:
        OSError: The file cannot be read or written.
    """
    try:
        if path.stat().st_size <= quota_bytes:
            return 0
        fd = open_contained(path, os.O_RDWR)
    except FileNotFoundError:
        return 0
    try:
        return _drop(fd, quota_bytes) if lock(fd, fcntl.LOCK_EX) else 0  # else readers keep it busy: the next look does it
    finally:
        os.close(fd)


def cap_all(folder: Path, quota_bytes: int) -> None:
    """`cap` every log in a folder; a fault concerns that log alone and is left to the next call."""
    try:
        paths = list(folder.iterdir())
    except OSError:  # the folder was removed: there is nothing to cap
        return
    for path in paths:
        try:
            cap(path, quota_bytes)
        except OSError:
            continue


def lock(fd: int, kind: int) -> bool:
    """Lock an open log until it is closed (LOCK_SH to read, LOCK_EX to move bytes); False when others kept it for too long."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return True
    return False


def _drop(fd: int, quota_bytes: int) -> int:
    size = os.fstat(fd).st_size
    delta, _ = shift(os.pread(fd, HEAD_BYTES, 0))
    start = size - quota_bytes // KEPT
    # Begin with a line, so with a whole character, too.
    start += os.pread(fd, _LONGEST_LINE, start).find(b"\n") + 1
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    marker = f"[posttrain {stamp}] older output was dropped here: the quota of a log is {quota_bytes} bytes; byte {start + delta} follows\n".encode()
    at = os.pwrite(fd, marker, 0)
    source = start
    while block := os.pread(fd, _BLOCK, source):  # also what is appended meanwhile; reading is always ahead of writing
        at += _pwrite(fd, block, at)
        source += len(block)
    os.ftruncate(fd, at)
    return start


def _pwrite(fd: int, data: bytes, at: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
    return done
