"""Reading what stands in a run's folder without trusting it: a named pipe blocks nobody, a link leads nowhere.

Programs of a job may put anything under the name of a record or log. Standard library only, since the shim loads it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class NotPlain(ValueError):
    """Under the name stands a link, a folder, a pipe or a device, where a plain file was looked for."""


def open_plain(path: Path) -> int:
    """A descriptor to read a plain file by; never waits, never follows a link in the last part of the path.

    Raises:
        FileNotFoundError: There is nothing of that name.
        NotPlain: It is no plain file.
        OSError: It may not be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:  # a plain file where a folder belongs holds no files
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            raise NotPlain(f"{path.name} is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotPlain(f"{path.name} is not a regular file")
    return fd


def is_plain(path: Path) -> bool:
    """Whether a plain file stands there, not a link to one."""
    try:
        return stat.S_ISREG(path.stat(follow_symlinks=False).st_mode)
    except (OSError, ValueError):  # ValueError: no name of a file at all
        return False


def read_plain(path: Path, max_bytes: int) -> bytes:
    """The whole content of a plain file.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ValueError: It is no plain file, or longer than `max_bytes`.
        OSError: It may not be read.
    """
    with open(open_plain(path), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path.name} is longer than {max_bytes:,} bytes")
    return data
