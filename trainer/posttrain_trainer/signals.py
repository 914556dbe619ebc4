"""Stop requests: SIGTERM or stop.json -> one answer that all ranks share, and the end of a rank that need not wait.

A request to pause waits for the next step boundary once training goes on; `cancel`, and any request before the first
step, ends the rank at once. A thread does the latter, woken by the interpreter's signal pipe: the main thread may sit
in a matrix product or a collective for seconds, during which no Python handler would run. The thread also ends
the ranks when the launcher that started them is gone. Loads no torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from posttrain_trainer.contract.events import StopWant
from posttrain_trainer.contract.locks import is_held
from posttrain_trainer.contract.proc import kill_marked
from posttrain_trainer.contract.rundir import ENV_ATTEMPT, ENV_LAUNCHER_LOCK, ENV_RUN_ID, AttemptDir, read_json

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_LAUNCHER_POLL_S = 1.0
_PEERS_WAIT_S = 3.0


class StopRequests:
    """What one rank knows of stop requests.

    Args:
        attempt: The attempt's folder.
        rank: Global rank.
        world_size: All ranks.
        at_once: Called by the thread before the rank ends without waiting, to record what was wanted; rank 0's job.
        vanished: Called by the thread of rank 0 when ranks are missing, so that the signal means a failure.
    """

    def __init__(self, attempt: AttemptDir, rank: int, world_size: int, *, at_once: Callable[[StopWant], None], vanished: Callable[[list[int]], None]) -> None:
        self._attempt = attempt
        self._rank = rank
        self._world_size = world_size
        self._at_once = at_once
        self._vanished = vanished
        self._signalled = threading.Event()
        self._waits_for_step = threading.Event()
        self._end = threading.Lock()

    def install(self) -> None:
        """Take over the signals and start the thread; from the main thread, once."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in _SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="stop-requests", daemon=True).start()

    def wait_for_steps(self) -> None:
        """From now on a request to pause is obeyed at the next step boundary, where the loop asks `pending`."""
        self._waits_for_step.set()
        if self._signalled.is_set():
            self._obey()

    @property
    def pending(self) -> bool:
        """Whether this rank knows of a request; ranks may learn of it at different steps, so sum it over all."""
        return self._signalled.is_set() or (self._rank == 0 and self._attempt.stop.exists())

    def want(self) -> StopWant:
        """What is wanted: what stop.json says; a signal without the file means pause."""
        return _want(self._attempt) or "pause"

    def claim_end(self) -> bool:
        """Take the right to record how this rank ended: True once, for whoever asks first."""
        return self._end.acquire(blocking=False)

    def _watch(self, reader: int) -> None:
        launcher = os.environ.get(ENV_LAUNCHER_LOCK)
        parent = os.getppid()
        while True:
            ready, _, _ = select.select([reader], [], [], _LAUNCHER_POLL_S if launcher else None)
            if ready:
                os.read(reader, 4096)
                self._signalled.set()
                self._obey()
            elif launcher and _is_free(Path(launcher)):
                _end_everything(parent)

    def _obey(self) -> None:
        want = _want(self._attempt)
        if want is None and self._attempt.errors():
            # torchrun ends the others when one rank failed: that rank has said why.
            _exit(1)
        if want == "cancel" or not self._waits_for_step.is_set():
            self._stop_now(want)

    def _stop_now(self, want: StopWant | None) -> None:
        if not self.claim_end():
            return  # the main thread is ending already
        if want is None and (missing := self._missing_ranks()):
            if self._rank == 0:
                self._vanished(missing)
            _exit(1)
        if self._rank == 0:
            self._at_once(want or "pause")
        _exit(0)

    def _missing_ranks(self) -> list[int]:
        """Ranks that did not get the signal too, because they are gone.

        Without stop.json a signal means either that somebody signalled torchrun, or that torchrun saw a rank die; in
        the first case all ranks get it and say so here.
        """
        if self._world_size == 1:
            return []
        self._mark(self._rank).touch()
        deadline = time.monotonic() + _PEERS_WAIT_S
        while True:
            missing = [rank for rank in range(self._world_size) if not self._mark(rank).exists()]
            if not missing or self._rank != 0 or time.monotonic() >= deadline:
                return missing if self._rank == 0 else []
            time.sleep(0.05)

    def _mark(self, rank: int) -> Path:
        return self._attempt.path / f".signalled-rank-{rank}"


def _want(attempt: AttemptDir) -> StopWant | None:
    data = read_json(attempt.stop)
    if data is None:
        return None
    # Anything but a clear cancel keeps the work done so far.
    return "cancel" if isinstance(data, dict) and data.get("want") == "cancel" else "pause"


def _is_free(lock: Path) -> bool:
    """Whether nobody holds the launcher's lock. A file that is missing or can't be tested says nothing of its holder."""
    try:
        return lock.exists() and not is_held(lock, alone=True)
    except OSError as error:
        print(f"[warning] whether the launcher lives can't be told: {error}", file=sys.stderr, flush=True)
        return False


def _exit(code: int) -> None:
    """End this process now, with its worker processes; the main thread may be anywhere."""
    for child in multiprocessing.active_children():
        child.kill()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_everything(parent: int) -> None:
    """The launcher is gone: end torchrun, the other ranks and this one."""
    print("[error] the launcher is gone; this rank ends", file=sys.stderr, flush=True)
    if parent > 1 and os.getppid() == parent:
        # A parent that had died would have another number, so this is torchrun.
        os.kill(parent, signal.SIGKILL)
    run_id, attempt = os.environ.get(ENV_RUN_ID), os.environ.get(ENV_ATTEMPT)
    if run_id and attempt and attempt.isdigit():
        kill_marked(run_id, int(attempt), timeout_s=2.0)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
