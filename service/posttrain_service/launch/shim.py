"""The process beside each attempt: owns its lock, starts torchrun, obeys stop requests, kills what is left, says how it ended.

Run as a file in an isolated interpreter (`python -I -S shim.py ...`), so that it starts in milliseconds and an upgrade
of the service can't reach into it: standard library and the contract's light modules only, all loaded at start.
It outlives the server; nobody waits for it. What it promises:

- An attempt runs at most once: the exclusive lock comes first, and an attempt that has a run.json never runs again.
- `exit.json` is written last, when no process of the attempt is left, and its space is set aside at the start.
- Its lock is free when it is dead, however it died.

Its own lines go to the same file as torchrun's output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # -I -S leaves only the standard library: the launcher names where our packages are
    sys.path += sys.argv[1].split(os.pathsep)

from posttrain_trainer.contract import cgroup, locks, logcap, proc
from posttrain_trainer.contract.plainfile import NotPlain
from posttrain_trainer.contract.reaper import Children, Signals, adopt_orphans
from posttrain_trainer.contract.rundir import AttemptDir, read_json, sync_folder, write_json

_POLL_S = 0.5  # a lost signal costs this much, never a lost stop request
_CANCEL_POLL_S = 0.02  # nothing tells of a rank's end, since torchrun is its parent
_LAUNCHER_S = 0.25  # torchrun's own time after its cancelled ranks are gone: it takes seconds where cores are few
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
    """How it ended, as exit.json has it but for `asked_at`, a monotonic time."""

    started_at: float
    asked_at: float | None = None
    reason: str = "exited"
    stop_want: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    leftovers_killed: int = 0
    unkillable: int = 0
    stop_took_s: float | None = None
    message: str | None = None


@dataclass
class Stop:
    """The stop request as far as it has been obeyed."""

    run_lock: Path
    want: str | None = None
    asked_at: float | None = None
    deadline: float | None = None
    _had_ranks: bool = False
    _alone_since: float | None = None

    def take(self, request: tuple[str | None, float], launcher: int) -> None:
        """Obey a request: SIGTERM to the launcher (which passes it to the ranks) once; cancel shortens a pause's grace."""
        want, grace_s = request
        now = time.monotonic()
        if self.deadline is None:
            say(f"stop requested ({want or 'by signal'}), {grace_s:g} s of grace")
            os.kill(launcher, signal.SIGTERM)  # our own child, not yet waited for: the number can't be another's
            _wake(launcher)
            self.asked_at, self.deadline = now, now + grace_s
        elif want == "cancel" and self.want != "cancel":
            say("the pause became a cancel")
            self.deadline = min(self.deadline, now + min(_HURRY_S, grace_s))
        if want == "cancel" and self.want != "cancel":
            # Nothing is to be saved, so nobody waits for torchrun to look up from its sleep and pass it on.
            self._had_ranks = self._is_held()
            for rank in proc.children(launcher):
                proc.send(rank, signal.SIGTERM)
        if self.want != "cancel":
            self.want = want

    @property
    def is_obeyed(self) -> bool:
        """Whether the ranks of a cancelled run are gone, and torchrun has had its time to end after them."""
        if self.want != "cancel":
            return False
        if self._is_held():
            self._had_ranks, self._alone_since = True, None
        elif self._had_ranks and self._alone_since is None:
            self._alone_since = time.monotonic()
        return self._alone_since is not None and time.monotonic() - self._alone_since >= _LAUNCHER_S

    def wait_s(self) -> float:
        """How long to wait for a signal before looking again."""
        if self.deadline is None:
            return _POLL_S
        return min(_CANCEL_POLL_S if self.want == "cancel" else _POLL_S, self.deadline - time.monotonic())

    def _is_held(self) -> bool:
        try:
            return locks.is_held(self.run_lock)
        except OSError:  # not known: the launcher's end or the grace decides
            return True

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
    if (fault := adopt_orphans("posttrain-shim")) is not None:
        say(f"no subreaper here ({fault}); descendants are found by their marker alone")
    reserve = _set_aside(order.attempt)
    group = cgroup.make(order.run_id, order.attempt.number)
    _write_run(order, end.started_at, None, group)
    try:
        if (request := _request(order, signals)) is not None:
            end.reason, end.stop_want = "stopped", request[0]
            say("stop requested before anything was started")
        else:
            _supervise(order, signals, children, end, group)
    except BaseException as error:
        end.reason, end.message = "supervision_failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        _finish(order, children, end, group)
        _write_exit(order.attempt, reserve, end)


def _supervise(order: Order, signals: Signals, children: Children, end: End, group: Path | None) -> None:
    """From the start of torchrun to its end, or to the end of the grace."""
    try:
        os.chdir(order.cwd)
        children.launcher = _start(order, group)
    except OSError as error:
        end.reason, end.message = "launch_failed", f"{order.argv[0]} in {order.cwd}: {error.strerror or error}"
        say(end.message)
        return
    _write_run(order, end.started_at, proc.identify(children.launcher), group)
    stop = Stop(order.attempt.run_lock)
    quota_bytes = int(os.environ.get(logcap.ENV_LOG_QUOTA, 0))
    while True:
        children.reap()
        if quota_bytes:
            logcap.cap_all(order.attempt.logs, quota_bytes)
        if children.status is not None:
            break
        if (request := _request(order, signals)) is not None:
            stop.take(request, children.launcher)
        if stop.is_over:
            say("the grace is over")
            end.reason = "killed"
            break
        if stop.is_obeyed:
            break
        signals.wait(stop.wait_s())
    if stop.deadline is not None:
        end.stop_want, end.asked_at = stop.want, stop.asked_at
        end.reason = "killed" if end.reason == "killed" else "stopped"


def _start(order: Order, group: Path | None) -> int:
    """Start torchrun, in the attempt's control group if there is one; its process number."""
    own = cgroup.own_group()
    # Born in the group, not moved there: a child that it starts at once would stay outside. The shim itself only visits.
    visits = group is not None and own is not None and cgroup.enter(group)
    try:
        # setsid: the shim's own session is never swept, so the job must not be in it.
        return os.posix_spawn(order.argv[0], order.argv, os.environ, setsid=True)
    finally:
        if visits and own is not None and not cgroup.enter(own):
            say("the shim stays in its job's control group, which can't be killed as a whole then")


def _wake(launcher: int) -> None:
    """Let stopped processes (SIGSTOP) go on, or they would never see the request."""
    for identity in proc.descendants(os.getpid()):
        proc.send(identity, signal.SIGCONT)
    os.kill(launcher, signal.SIGCONT)


def _finish(order: Order, children: Children, end: End, group: Path | None) -> None:
    """Leave no process of the attempt behind and note how the launcher ended."""

    def left() -> list[proc.Identity]:
        found = {*proc.descendants(os.getpid()), *proc.find(order.run_id, order.attempt.number)}
        return sorted(found, key=lambda identity: identity.start)

    ended_in_order = end.reason == "exited" or (end.reason == "stopped" and end.stop_want != "cancel")
    linger_until = time.monotonic() + (_LINGER_S if ended_in_order else 0.0)
    while left() and time.monotonic() < linger_until:
        children.reap_and_pause(0.02)
    killed_with_group = _kill_group(order, group, children)
    killed = proc.kill_all(left, timeout_s=_KILL_S, pause=children.reap_and_pause)
    children.reap()
    end.leftovers_killed, end.unkillable = killed_with_group + killed.num_killed, len(killed.left)
    if end.asked_at is not None:
        end.stop_took_s = round(time.monotonic() - end.asked_at, 3)
    if children.status is not None:
        end.exit_code = children.status if children.status >= 0 else None
        end.signal = -children.status if children.status < 0 else None
    say(
        f"{end.reason}: exit code {end.exit_code}, signal {end.signal}, "
        f"{end.leftovers_killed} killed at the end, {end.unkillable} could not be killed"
    )


def _kill_group(order: Order, group: Path | None, children: Children) -> int:
    """Kill the control group, which nothing in it escapes; how many processes there were."""
    if group is None:
        return 0
    members = cgroup.pids(group)
    if not cgroup.kill(group, order.run_id, order.attempt.number, timeout_s=_KILL_S):
        say("the job's control group could not be removed")
        return 0
    children.reap()
    return len(members)


def _request(order: Order, signals: Signals) -> tuple[str | None, float] | None:
    """The stop request as it stands: what is wanted and its grace in seconds. None = go on."""
    try:
        data = read_json(order.attempt.stop)
    except NotPlain:  # nobody's request: the run can't be supervised any more
        raise
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


def _write_run(order: Order, started_at: float, launcher: proc.Identity | None, group: Path | None) -> None:
    record = {
        "v": 1,
        "run_id": order.run_id,
        "attempt": order.attempt.number,
        "host": os.uname().nodename,
        "shim": proc.own().to_json(),
        "torchrun": None if launcher is None else launcher.to_json(),
        "argv": order.argv,
        "cwd": order.cwd,
        "cgroup": None if group is None else str(group),
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
    del record["asked_at"]
    if end.message is not None:
        record["message"] = end.message[:500]
    text = json.dumps(record, ensure_ascii=False).encode(errors="replace")
    with reserve.open("r+b") as file:
        file.write(text.ljust(_RESERVE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    reserve.replace(attempt.exit)
    sync_folder(attempt.path)


if __name__ == "__main__":
    main(sys.argv[2:])
