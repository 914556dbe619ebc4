"""Which process is which: identity that survives recycled numbers, finding a job's processes, killing them all.

Standard library only on Linux, since the shim loads it; elsewhere psutil is imported on first use. A process is known
by pid + start time + boot + pid namespace, never by its number alone. A job's processes are found by the environment
marker that they all inherit (it survives exec, setsid and double forks) or as descendants of the shim. Nothing here
ever signals a pid below 2, this process, its ancestors or its session.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from posttrain_trainer.contract.rundir import ENV_ATTEMPT, ENV_RUN_ID

_PROC = "/proc"


@dataclass(frozen=True)
class Identity:
    """One process, told apart from every other that ever had or will have its number."""

    pid: int
    """Its number, as seen from `pid_namespace`."""
    start: int
    """When it started: clock ticks since boot on Linux, microseconds since the epoch elsewhere."""
    boot_id: str
    """The boot of the machine it belongs to."""
    pid_namespace: str
    """The pid namespace that `pid` is a number of; empty where there are none."""

    def to_json(self) -> dict[str, Any]:
        """The identity as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(data: object) -> Identity | None:
        """The identity in a record, or None when the record holds none."""
        if not isinstance(data, dict):
            return None
        pid, start = data.get("pid"), data.get("start")
        if type(pid) is not int or type(start) is not int:
            return None
        return Identity(pid, start, str(data.get("boot_id")), str(data.get("pid_namespace")))


@dataclass(frozen=True)
class Killed:
    """What a kill loop did."""

    num_killed: int
    """Processes that were there and are gone."""
    left: tuple[Identity, ...]
    """Processes still there when the time was over (in an uninterruptible wait, or another user's)."""


class _Table(Protocol):
    """What is asked of a platform's process table; zombies count as gone everywhere."""

    def boot(self) -> tuple[str, str]: ...
    def start(self, pid: int) -> int | None: ...
    def parent(self, pid: int) -> int: ...
    def parents(self) -> dict[int, int]: ...
    def environ(self, pid: int) -> dict[str, str]: ...


def own() -> Identity:
    """The identity of this process."""
    me = identify(os.getpid())
    assert me is not None
    return me


def boot_id() -> str:
    """The same for all that was written since this machine was started, and for nothing before."""
    return _table().boot()[0]


def identify(pid: int) -> Identity | None:
    """The identity of the process that has this number now; None when none (or only a zombie) has it."""
    start = _table().start(pid)
    return None if start is None else Identity(pid, start, *_table().boot())


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs. A zombie does not; one of another boot or namespace can't be seen."""
    return identify(identity.pid) == identity


def carries(identity: Identity, run_id: str, attempt: int | None = None) -> bool:
    """Whether this process still runs and was started with the marker of the run (and of the attempt, if given)."""
    # The marker first: a number that was recycled in between fails the second question.
    return _is_marked(identity.pid, run_id, attempt) and is_alive(identity)


def find(run_id: str, attempt: int | None = None) -> list[Identity]:
    """All processes with the marker of a run (of one attempt, if given) but this one, its ancestors and its session.

    Other users' processes can't be read and so are never found, except by root.
    """
    spared = _spared()
    marked = [pid for pid in _table().parents() if _is_marked(pid, run_id, attempt)]
    found = [identity for pid in marked if not _is_spared(pid, spared) and (identity := identify(pid)) is not None]
    # Asked again of what has an identity by now: the number may have been recycled since the first question.
    return [identity for identity in found if carries(identity, run_id, attempt)]


def descendants(pid: int) -> list[Identity]:
    """Children, grandchildren and so on of `pid`, as far as the chain of living parents leads."""
    children: dict[int, list[int]] = {}
    for child, parent in _table().parents().items():
        children.setdefault(parent, []).append(child)
    spared = _spared()
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            todo.append(child)
            found.append(identify(child))
    return [identity for identity in found if identity is not None and not _is_spared(identity.pid, spared)]


def children(pid: int) -> list[Identity]:
    """The living children of `pid`: of torchrun these are its ranks."""
    spared = _spared()
    found = [identify(child) for child, parent in _table().parents().items() if parent == pid and not _is_spared(child, spared)]
    return [identity for identity in found if identity is not None]


def send(identity: Identity, signum: int) -> bool:
    """Signal exactly this process, through a pidfd where the platform has them.

    Returns:
        True when the signal was delivered; False when the process is gone, is spared (see the module), or may not be
        signalled by this user.
    """
    if _is_spared(identity.pid, _spared()):
        return False
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # no such call on this platform, or a sandbox forbids it
        return is_alive(identity) and _kill(identity.pid, signum)
    try:
        # Looked at after the pidfd is open: from here on the number can't come to mean another process.
        if not is_alive(identity):
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def kill_all(
    look: Callable[[], Iterable[Identity]],
    *,
    timeout_s: float = 10.0,
    pause: Callable[[float], object] = time.sleep,
) -> Killed:
    """SIGKILL whatever `look` finds, again and again, until two looks in a row find nothing.

    One look is not enough: the process table is not read at one instant, so a child born meanwhile can be missed once.

    Args:
        look: Finds the processes that must go, e.g. `lambda: find(run_id)`.
        timeout_s: When to give up on what does not die.
        pause: Waits between two looks; the shim reaps its dead children here.
    """
    seen: set[Identity] = set()
    deadline = time.monotonic() + timeout_s
    empty_looks, wait_s = 0, 0.002
    while True:
        left = tuple(look())
        seen.update(left)
        empty_looks = 0 if left else empty_looks + 1
        if empty_looks == 2 or time.monotonic() >= deadline:
            return Killed(len(seen - set(left)), left)
        for identity in left:
            send(identity, signal.SIGKILL)
        pause(wait_s)
        wait_s = min(wait_s * 2, 0.05)


def kill_marked(run_id: str, attempt: int | None = None, *, timeout_s: float = 10.0) -> Killed:
    """SIGKILL every process that carries the marker of a run (of one attempt, if given)."""
    return kill_all(lambda: find(run_id, attempt), timeout_s=timeout_s)


def _is_marked(pid: int, run_id: str, attempt: int | None) -> bool:
    environ = _table().environ(pid)
    return environ.get(ENV_RUN_ID) == run_id and (attempt is None or environ.get(ENV_ATTEMPT) == str(attempt))


def _spared() -> frozenset[int]:
    """Numbers of this process, its ancestors, and the kernel's own."""
    chain, pid = {0, 1}, os.getpid()
    while pid not in chain:
        chain.add(pid)
        pid = _table().parent(pid)
    return frozenset(chain)


def _is_spared(pid: int, spared: frozenset[int]) -> bool:
    if pid < 2 or pid in spared:
        return True
    try:
        return os.getsid(pid) == os.getsid(0)
    except OSError:
        return False  # gone meanwhile; signalling it is a no-op


def _kill(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EPERM):
            return False
        raise
    return True


class _LinuxTable:
    """/proc, read directly: a look at some hundred processes takes a few milliseconds."""

    @staticmethod
    @lru_cache(maxsize=1)
    def boot() -> tuple[str, str]:
        try:
            namespace = str(Path(f"{_PROC}/self/ns/pid").stat().st_ino)
        except OSError:  # a sandbox that hides namespaces has one of them
            namespace = ""
        return _read(f"{_PROC}/sys/kernel/random/boot_id").decode().strip(), namespace

    def start(self, pid: int) -> int | None:
        fields = self._fields(pid)
        return None if fields is None else int(fields[19])

    def parent(self, pid: int) -> int:
        fields = self._fields(pid)
        return 0 if fields is None else int(fields[1])

    def parents(self) -> dict[int, int]:
        pids = [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]
        return {pid: int(fields[1]) for pid in pids if (fields := self._fields(pid)) is not None}

    def environ(self, pid: int) -> dict[str, str]:
        pairs = (item.partition(b"=") for item in _read(f"{_PROC}/{pid}/environ").split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}

    @staticmethod
    def _fields(pid: int) -> list[bytes] | None:
        """The fields of stat from the state (the third) on; the name before may hold spaces and brackets."""
        fields = _read(f"{_PROC}/{pid}/stat").rpartition(b")")[2].split()
        return None if not fields or fields[0] in (b"Z", b"X", b"x") else fields


class _PsutilTable:
    """Platforms without /proc (macOS). Start times are those of psutil, to the microsecond."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil

    @staticmethod
    @lru_cache(maxsize=1)
    def boot() -> tuple[str, str]:
        import subprocess

        answer = subprocess.run(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, check=True)
        return answer.stdout.decode().strip(), ""

    def start(self, pid: int) -> int | None:
        try:
            process = self._psutil.Process(pid)
            if process.status() == self._psutil.STATUS_ZOMBIE:
                return None
            return round(process.create_time() * 1e6)
        except self._psutil.Error:
            return None

    def parent(self, pid: int) -> int:
        try:
            return int(self._psutil.Process(pid).ppid())
        except self._psutil.Error:
            return 0

    def parents(self) -> dict[int, int]:
        processes = self._psutil.process_iter(["pid", "ppid", "status"])
        facts = [process.info for process in processes]
        return {f["pid"]: f["ppid"] or 0 for f in facts if f["status"] != self._psutil.STATUS_ZOMBIE}

    def environ(self, pid: int) -> dict[str, str]:
        try:
            return dict(self._psutil.Process(pid).environ())
        except (self._psutil.Error, OSError):
            return {}


@lru_cache(maxsize=1)
def _table() -> _Table:
    return _LinuxTable() if sys.platform == "linux" else _PsutilTable()


def _read(path: str) -> bytes:
    """The content of a /proc file; empty when the process is gone or another user's."""
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
