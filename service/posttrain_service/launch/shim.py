"""The process beside each attempt: owns its lock, starts torchrun, obeys stop requests, kills what is left, says how it ended.

Run as a file in an isolated interpreter (`python -I -S shim.py ...`), so that it starts in milliseconds and an upgrade
of the service can't reach into it: standard library and the contract's three light modules only, all loaded at start.
It outlives the server; nobody waits for it. What it promises:

- An attempt runs at most once: the exclusive lock comes first, and an attempt that has a run.json never runs again.
- `exit.json` is written last, when no process of the attempt is left, and its space is set aside at the start.
- Its lock is free when it is dead, however it died.

Its own lines go to the same file as torchrun's output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # -I -S leaves only the standard library: the launcher names where our packages are
    sys.path += sys.argv[1].split(os.pathsep)

from posttrain_trainer.contract import locks, proc
from posttrain_trainer.contract.rundir import AttemptDir, read_json, sync_folder, write_json

_POLL_S = 0.5  # a lost signal costs this much, never a lost stop request
_LINGER_S = 2.0  # for helpers that are about to end after the ranks did, e.g. a tracker's uploader
_HURRY_S = 5.0  # most of what is left of a pause's grace when it becomes a cancel
_KILL_S = 30.0
_RESERVE_BYTES = 4096


@dataclass(frozen=True)
class Order:
    """What to run, from the command line."""

    attempt: AttemptDir
    run_id: str
    cwd: str
    grace_s: float
    argv: list[str]

    @staticmethod
    def parse(args: list[str]) -> Order:
        """From `[attempt_dir, run_id, cwd, grace_s, program, *arguments]`."""
        attempt_dir, run_id, cwd, grace_s, *argv = args
        return Order(AttemptDir(Path(attempt_dir)), run_id, cwd, float(grace_s), argv)


@dataclass
class End:
    """How it ended, as exit.json has it."""

    started_at: float
    reason: str = "exited"
    stop_want: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    leftovers_killed: int = 0
    unkillable: int = 0
    message: str | None = None


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


@dataclass
class Stop:
    """The stop request as far as it has been obeyed."""

    want: str | None = None
    deadline: float | None = None

    def take(self, request: tuple[str | None, float], launcher: int) -> None:
        """Obey a request: SIGTERM to the launcher (which passes it to the ranks) once; cancel shortens a pause's grace."""
        want, grace_s = request
        now = time.monotonic()
        if self.deadline is None:
            say(f"stop requested ({want or 'by signal'}), {grace_s:g} s of grace")
            os.kill(launcher, signal.SIGTERM)  # our own child, not yet waited for: the number can't be another's
            self.deadline = now + grace_s
        elif want == "cancel" and self.want != "cancel":
            say("the pause became a cancel")
            self.deadline = min(self.deadline, now + min(_HURRY_S, grace_s))
        if self.want != "cancel":
            self.want = want

    @property
    def is_over(self) -> bool:
        """Whether the grace has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline


def main(args: list[str]) -> None:
    """Detach, then run the attempt, unless another shim has it or had it."""
    order = Order.parse(args)
    _detach()
    try:
        lock = locks.Lock(order.attempt.shim_lock)
    except locks.LockHeld:
        say(f"attempt {order.attempt.number} is already running; nothing is started")
        return
    if order.attempt.run.exists() or order.attempt.exit.exists():
        lock.release()
        say(f"attempt {order.attempt.number} has already run; nothing is started")
        return
    _run(order)  # the lock is given up by exiting, so whoever finds it free finds no process either


def say(text: str) -> None:
    """One line into the launcher's log; a full disk doesn't stop the run."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        os.write(2, f"[posttrain {stamp}] {text}\n".encode())
    except OSError:
        return


def _detach() -> None:
    """Leave the launching process: own session, never its child, no terminal to come back to."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")


def _run(order: Order) -> None:
    signals, children, end = Signals(), Children(), End(started_at=time.time())
    signals.install()
    _adopt_orphans()
    reserve = _set_aside(order.attempt)
    _write_run(order, end.started_at, None)
    try:
        if (request := _request(order, signals)) is not None:
            end.reason, end.stop_want = "stopped", request[0]
            say("stop requested before anything was started")
        else:
            _supervise(order, signals, children, end)
    except BaseException as error:
        end.reason, end.message = "supervision_failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        _finish(order, children, end)
        _write_exit(order.attempt, reserve, end)


def _supervise(order: Order, signals: Signals, children: Children, end: End) -> None:
    """From the start of torchrun to its end, or to the end of the grace."""
    try:
        os.chdir(order.cwd)
        # setsid: the shim's own session is never swept, so the job must not be in it.
        children.launcher = os.posix_spawn(order.argv[0], order.argv, os.environ, setsid=True)
    except OSError as error:
        end.reason, end.message = "launch_failed", f"{order.argv[0]} in {order.cwd}: {error.strerror or error}"
        say(end.message)
        return
    _write_run(order, end.started_at, proc.identify(children.launcher))
    stop = Stop()
    while True:
        children.reap()
        if children.status is not None:
            break
        if (request := _request(order, signals)) is not None:
            stop.take(request, children.launcher)
        if stop.is_over:
            say("the grace is over")
            end.reason = "killed"
            break
        left_s = _POLL_S if stop.deadline is None else stop.deadline - time.monotonic()
        signals.wait(min(_POLL_S, left_s))
    if stop.deadline is not None:
        end.stop_want = stop.want
        end.reason = "killed" if end.reason == "killed" else "stopped"


def _finish(order: Order, children: Children, end: End) -> None:
    """Leave no process of the attempt behind and note how the launcher ended."""

    def left() -> list[proc.Identity]:
        found = {*proc.descendants(os.getpid()), *proc.find(order.run_id, order.attempt.number)}
        return sorted(found, key=lambda identity: identity.start)

    ended_in_order = end.reason == "exited" or (end.reason == "stopped" and end.stop_want != "cancel")
    linger_until = time.monotonic() + (_LINGER_S if ended_in_order else 0.0)
    while left() and time.monotonic() < linger_until:
        children.reap_and_pause(0.02)
    killed = proc.kill_all(left, timeout_s=_KILL_S, pause=children.reap_and_pause)
    children.reap()
    end.leftovers_killed, end.unkillable = killed.num_killed, len(killed.left)
    if children.status is not None:
        end.exit_code = children.status if children.status >= 0 else None
        end.signal = -children.status if children.status < 0 else None
    say(
        f"{end.reason}: exit code {end.exit_code}, signal {end.signal}, "
        f"{end.leftovers_killed} killed at the end, {end.unkillable} could not be killed"
    )


def _request(order: Order, signals: Signals) -> tuple[str | None, float] | None:
    """The stop request as it stands: what is wanted and its grace in seconds. None = go on."""
    try:
        data = read_json(order.attempt.stop)
    except ValueError:
        data = {}  # not ours, yet somebody wants an end
    if data is None:
        return (None, order.grace_s) if signals.terminate else None
    record = data if isinstance(data, dict) else {}
    want, grace_s = record.get("want"), record.get("grace_s")
    return (
        want if want in ("cancel", "pause") else None,
        float(grace_s) if isinstance(grace_s, int | float) and grace_s >= 0 else order.grace_s,
    )


def _write_run(order: Order, started_at: float, launcher: proc.Identity | None) -> None:
    record = {
        "v": 1,
        "run_id": order.run_id,
        "attempt": order.attempt.number,
        "host": os.uname().nodename,
        "shim": proc.own().to_json(),
        "torchrun": None if launcher is None else launcher.to_json(),
        "argv": order.argv,
        "cwd": order.cwd,
        "grace_s": order.grace_s,
        "started_at": started_at,
    }
    # Durable the first time, before anything is started; the launcher's identity is only for people.
    write_json(order.attempt.run, record, durable=launcher is None)


def _set_aside(attempt: AttemptDir) -> Path:
    """Real disk space for exit.json, so that a run that fills the disk can still say how it ended."""
    path = attempt.path / ".exit.json.reserve"
    with path.open("wb") as file:
        file.write(b" " * _RESERVE_BYTES)
        file.flush()
        os.fsync(file.fileno())
    return path


def _write_exit(attempt: AttemptDir, reserve: Path, end: End) -> None:
    """Fill the space set aside (blanks behind JSON are JSON) and rename it into place."""
    record: dict[str, Any] = {"v": 1, **vars(end), "ended_at": time.time()}
    if end.message is not None:
        record["message"] = end.message[:500]
    text = json.dumps(record, ensure_ascii=False).encode(errors="replace")
    with reserve.open("r+b") as file:
        file.write(text.ljust(_RESERVE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    reserve.replace(attempt.exit)
    sync_folder(attempt.path)


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none gets out of sight (Linux only)."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(15, b"posttrain-shim", 0, 0, 0)  # PR_SET_NAME, for people who read `ps`
        if libc.prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
            say(f"no subreaper here ({os.strerror(ctypes.get_errno())}); descendants are found by their marker alone")


if __name__ == "__main__":
    main(sys.argv[2:])
