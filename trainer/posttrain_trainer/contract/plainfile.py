"""Reading what stands in a run's folder without trusting it: a named pipe blocks nobody, a link leads nowhere.

Programs of a job may put anything under the name of a record, a log or a folder of them. Below the run's folder, which
is told by the layout (`attempts/<n>/...`, `checkpoints/step-<n>/...`), each part of a path is opened by itself and none
may be a link, so that no reader is led out of the run. What is above it belongs to whoever runs the service, and may be
linked. Standard library only, since the shim loads it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ENTRY = {"attempts": re.compile(r"[1-9][0-9]{0,8}"), "checkpoints": re.compile(r"step-[0-9]{6,18}")}
_TOPS = frozenset(_ENTRY)
_PIECE = 2**20
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


class NotPlain(ValueError):
    """Under the name stands a link, a folder, a pipe or a device, where a plain file was looked for."""


def open_contained(path: Path, flags: int, mode: int = 0o644) -> int:
    """A descriptor, close-on-exec, of what stands there, reached through no link inside its run's folder.

    Args:
        path: A file of a run, or any other one, of which only the last part may be no link.
        flags: As for os.open.
        mode: Of a file that is made.

    Raises:
        OSError: As os.open does; with ELOOP for a link, wherever in the run it stands.
    """
    with _folder_of(path) as (folder, name):
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)


def open_plain(path: Path) -> int:
    """A descriptor to read a plain file by; never waits, never follows a link inside the run's folder.

    Raises:
        FileNotFoundError: There is nothing of that name.
        NotPlain: It is no plain file, or stands behind a link.
        OSError: It may not be read.
    """
    try:
        fd = open_contained(path, os.O_RDONLY | os.O_NONBLOCK)
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
    """Whether a plain file stands there, not a link to one, and not behind a link."""
    try:
        with _folder_of(path) as (folder, name):
            return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except (OSError, ValueError):  # ValueError: no name of a file at all
        return False


def names_in(folder: Path) -> list[str]:
    """Names in a folder of a run; none where there is no folder, or a link stands for it or in front of it.

    Raises:
        OSError: It may not be read.
    """
    try:
        fd = open_contained(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno == errno.ELOOP:
            return []
        raise
    try:
        return os.listdir(fd)  # noqa: PTH208 - a descriptor, not a path
    finally:
        os.close(fd)


def read_plain(path: Path, max_bytes: int) -> bytes:
    """The whole content of a plain file.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ValueError: It is no plain file, or longer than `max_bytes`.
        OSError: It may not be read.
    """
    fd = open_plain(path)
    try:  # descriptors alone: a file object is half of what reading a short record costs
        data, wanted = b"", max_bytes + 1
        while len(data) < wanted and (piece := os.read(fd, min(wanted - len(data), _PIECE))):
            data += piece
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise ValueError(f"{path.name} is longer than {max_bytes:,} bytes")
    return data


def _num_inside(parts: tuple[str, ...]) -> int:
    """How many parts at the end of a path lie inside a run's folder; 1, the last one, where it is of no run."""
    for start in range(len(parts) - 2, -1, -1):
        if parts[start] in _TOPS and _ENTRY[parts[start]].fullmatch(parts[start + 1]):
            return len(parts) - start
    return 1


@contextmanager
def _folder_of(path: Path) -> Iterator[tuple[int | None, str]]:
    """A descriptor of the folder that holds the last part of a path, and that part's name as os functions take both."""
    count = _num_inside(path.parts)
    if count == 1:
        yield None, str(path)
        return
    fd = os.open(path.parents[count - 1], _FOLDER)
    try:
        for part in path.parts[-count:-1]:
            fd, above = _enter(fd, part, path), fd
            os.close(above)
        yield fd, path.name
    finally:
        os.close(fd)


def _enter(folder: int, name: str, path: Path) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError as error:  # which some systems say of a link
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
        raise
