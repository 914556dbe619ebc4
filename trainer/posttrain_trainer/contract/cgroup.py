"""A control group for each attempt, where the host delegates cgroup v2: `cgroup.kill` ends all of it at one instant.

Standard library only, since the shim loads it. It is an addition and never a need: without a writable hierarchy there is
no group, and the job's processes are found as descendants and by their marker. A group can't be left by clearing the
environment or by forking twice, which is what those two miss once the shim is dead.

Groups are named `posttrain-<run id>-<attempt>` and lie below the group of the process that started the job. No group of
another name is ever killed or removed, whatever a record says.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PREFIX = "posttrain-"


def make(run_id: str, attempt: int) -> Path | None:
    """A new, empty group below this process's own, or None when this host has none to give."""
    if (own := _own()) is None:
        return None
    group = own / f"{_PREFIX}{run_id}-{attempt}"
    try:
        group.mkdir()
    except FileExistsError:
        return None  # left by a shim that was killed: its processes aren't ours to mix with
    except OSError:  # read-only or not delegated
        return None
    if (group / "cgroup.kill").exists() and os.access(group / "cgroup.procs", os.W_OK):
        return group
    _remove(group)  # a kernel before 5.14
    return None


def enter(group: Path, pid: int = 0) -> bool:
    """Move a process (0 = this one) with what it will start into a group; False when that isn't allowed."""
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def own_group() -> Path | None:
    """The group that this process is in; None without a cgroup v2 hierarchy."""
    return _own()


def pids(group: Path) -> list[int]:
    """Numbers of the processes in a group; none when it has gone."""
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def kill(group: Path, run_id: str, attempt: int, *, timeout_s: float = 10.0) -> bool:
    """SIGKILL everything in the group of that attempt and remove it.

    Returns:
        Whether no such group is left. A group of another name, and one that this process is in, is left alone: False.
    """
    if group.name != f"{_PREFIX}{run_id}-{attempt}" or not _is_group(group) or group == _own():
        return False
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            (group / "cgroup.kill").write_text("1")
        except FileNotFoundError:
            return True
        except OSError:
            return False
        if _remove(group):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)


def _remove(group: Path) -> bool:
    """Remove a group with the empty ones below it; False while a process is in it."""
    try:
        for folder, _, _ in os.walk(group, topdown=False):
            Path(folder).rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # busy
        return False
    return True


def _is_group(path: Path) -> bool:
    mount = _mount()
    return mount is not None and path.is_absolute() and ".." not in path.parts and path.is_relative_to(mount)


def _own() -> Path | None:
    """The folder of this process's group in the cgroup v2 hierarchy, if one is mounted."""
    mount = _mount()
    if mount is None:
        return None
    for line in _lines("/proc/self/cgroup"):
        if line.startswith("0::"):
            return mount / line.removeprefix("0::").lstrip("/")
    return None


def _mount() -> Path | None:
    """Where cgroup v2 is mounted with its root as this process sees it."""
    for line in _lines("/proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields = left.split()
        if right.startswith("cgroup2 ") and fields[3] == "/":
            return Path(fields[4].encode().decode("unicode_escape"))
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # no /proc: not Linux
        return []
