"""Being the parent of a process tree: reaping what ends, waking up by signals, adopting orphans.

Standard library only, since the shim loads it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field


@dataclass
class Children:
    """Reaps everything that ends below this process and keeps the exit status of the one that matters."""

    launcher: int = 0
    status: int | None = None

    def reap(self) -> None:
        """Wait for all that has ended, blocking on none."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.launcher:
                self.status = os.waitstatus_to_exitcode(status)

    def reap_and_pause(self, seconds: float) -> None:
        """Reap now and after a pause: the `pause` of a kill loop."""
        self.reap()
        time.sleep(seconds)
        self.reap()


@dataclass
class Signals:
    """Turns signals into wake-ups of the one place that waits. The handlers vanish in children by exec."""

    terminate: bool = False
    _pipe: tuple[int, int] = field(default_factory=os.pipe)

    def install(self) -> None:
        """Take over the signals, whatever the launching process had set or blocked."""
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for end in self._pipe:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_terminate)
        for signum in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(signum, self._on_other)

    def wait(self, timeout_s: float) -> None:
        """Return at the next signal, or after `timeout_s`."""
        if select.select([self._pipe[0]], [], [], max(0.0, timeout_s))[0]:
            os.read(self._pipe[0], 4096)

    def _on_terminate(self, _signum: int, _frame: object) -> None:
        self.terminate = True

    def _on_other(self, _signum: int, _frame: object) -> None:
        pass


def adopt_orphans(name: str) -> str | None:
    """Become the parent of every descendant whose own parent ends, so that none gets out of sight (Linux only).

    Args:
        name: What people who read `ps` shall see instead of the interpreter's name; 15 bytes.

    Returns:
        None, or why this system doesn't do it.
    """
    if sys.platform != "linux":
        return "only Linux has it"
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
    if libc.prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        return os.strerror(ctypes.get_errno())
    return None
