"""Lock files: whoever holds one is alive, and the kernel frees it when its holder dies, however that happens.

Standard library only, since the shim loads it. Locks are flock(2) on local disk: exclusive for the shim, shared for the
ranks. The descriptor is close-on-exec, so no descendant can keep a lock that its holder lost. A lock is never a PID
question, so recycled process numbers can't lie about it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain_trainer.contract.plainfile import open_contained

_RETRY_S = 0.005


class LockHeld(Exception):
    """Somebody else holds the lock."""


class Lock:
    """A lock that is held from construction until `release()` or the end of the process.

    Args:
        path: The lock file; made when missing. A symbolic link is refused with OSError, as is one in front of it in a run.
        shared: Several holders at a time, excluded only by an exclusive one.
        wait_s: How long to try. A little above zero even for "at once": `is_held` takes the lock for some
            microseconds to test it, and that must not turn a lone holder away.

    Raises:
        LockHeld: Another process (or another Lock of this one) held it all the time.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait_s: float = 0.5) -> None:
        self.path = path
        self._fd: int | None = None
        deadline = time.monotonic() + wait_s
        while True:
            self._fd = _try(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if self._fd is not None:
                return
            if time.monotonic() >= deadline:
                raise LockHeld(f"{path} is held by another process")
            time.sleep(_RETRY_S)

    def release(self) -> None:
        """Give the lock up; doing so again changes nothing."""
        if self._fd is not None:
            # Unlocked by name: a fork of another thread may own a copy of the descriptor until its exec.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None


@contextmanager
def hold(path: Path, *, shared: bool = False, wait_s: float = 0.5) -> Iterator[Lock]:
    """Hold a lock for the length of a with-block; arguments and errors as for `Lock`."""
    lock = Lock(path, shared=shared, wait_s=wait_s)
    try:
        yield lock
    finally:
        lock.release()


def is_held(path: Path, *, alone: bool = False) -> bool:
    """Whether anybody, this process included, holds the lock in either way. A missing file is not held.

    Args:
        path: The lock file.
        alone: The lock is only ever held exclusively, as a shim's is. Asking is much cheaper then: those who ask share the
            lock and don't turn each other away, so a refusal needs no second look.

    Raises:
        OSError: The file can't be opened or the file system has no locks, so nothing is known.
    """
    try:
        fd = open_contained(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if alone else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return alone or not _is_only_tested(fd)
    finally:
        os.close(fd)
    return False


def _is_only_tested(fd: int) -> bool:
    """Whether the lock that turned us away was gone a moment later: another `is_held`, not a holder."""
    for _ in range(3):
        time.sleep(_RETRY_S / 10)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        fcntl.flock(fd, fcntl.LOCK_UN)
        return True
    return False


def _try(path: Path, how: int) -> int | None:
    """Lock the file that `path` names now: a descriptor, or None when somebody else has it."""
    fd = open_contained(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        if _is_same_file(fd, path):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_same_file(fd: int, path: Path) -> bool:
    """False when the file was deleted or replaced between opening and locking, so that others lock another one."""
    try:
        now = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino)
