"""`train_torchrun`: start the ranks of one attempt as a child process, wait for them, and tell how it ended.

The caller's process loads no torch. Each call makes the next attempt in `ckpt_output_dir`; the ranks say how they ended
in files there, which decide, and never torchrun's exit code alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.command import RANK_ENVIRONMENT, torchrun_argv
from posttrain_trainer.contract.errors import (
    InvalidArguments,
    InvalidData,
    LaunchFailed,
    Lost,
    ModelNotFound,
    TrainerError,
)
from posttrain_trainer.contract.events import RunResult
from posttrain_trainer.contract.locks import Lock, LockHeld, hold, is_held
from posttrain_trainer.contract.modelpath import neither_here_nor_on_a_hub
from posttrain_trainer.contract.proc import kill_marked
from posttrain_trainer.contract.rundir import (
    ENV_ATTEMPT,
    ENV_LAUNCHER_LOCK,
    ENV_RUN_ID,
    AttemptDir,
    RunDir,
    read_json,
    write_json,
)
from posttrain_trainer.contract.spec import AttemptArguments, FullTrainingArguments, TorchrunArguments

_JOIN_WAIT_S = 120.0
_AFTER_GRACE_S = 15.0
_TAIL_BYTES = 4000
_KILLED = re.compile(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S)


def train_torchrun(
    torch_args: TorchrunArguments,
    train_args: FullTrainingArguments,
    *,
    python: str | None = None,
    on_start: Callable[[AttemptDir], None] = lambda attempt: None,
) -> RunResult:
    """Train, in ranks started by torchrun, and wait for the end.

    Ctrl-C, and SIGTERM when called from the main thread, are passed on: the ranks write a checkpoint within
    `shutdown_timeout_s` and end; no process is left behind, also when this one is killed.

    Args:
        torch_args: How many ranks, and where they meet. With several nodes, each calls this with its own node_rank
            and the same `ckpt_output_dir` on a shared file system.
        train_args: What to train.
        python: Interpreter that has torch and posttrain_trainer; None = this one.
        on_start: Called with the attempt's folder, where progress can be read, before torchrun starts.

    Returns:
        How the run ended in order: completed, or stopped by SIGTERM.

    Raises:
        TrainerError: The error of the rank that failed (its code, message, rank and exit code), or LaunchFailed when no
            rank could say why, or ModelNotFound or InvalidData before anything is started. Without a record of the end, no exit of
            torchrun is a success.
        KeyboardInterrupt: Ctrl-C, after the ranks have ended.
    """
    if sys.platform == "win32":
        raise InvalidArguments("posttrain trains on Linux and macOS; on Windows use WSL")
    _check_paths(train_args)
    run_dir = RunDir(Path(train_args.ckpt_output_dir).expanduser().resolve())
    train_args = train_args.model_copy(update={"ckpt_output_dir": str(run_dir.path)})
    attempt, lock = _enter_attempt(run_dir, torch_args, train_args)
    try:
        on_start(attempt)
        code, stopped = _run(torchrun_argv(python or sys.executable, torch_args, attempt.path), attempt, lock.path, torch_args)
        return _outcome(run_dir, attempt, code, stopped=stopped)
    finally:
        lock.release()


def _check_paths(train_args: FullTrainingArguments) -> None:
    """Refuse at once what the ranks would find out some ten seconds later."""
    if (refusal := neither_here_nor_on_a_hub(train_args.model_path)) is not None:
        raise ModelNotFound(refusal)
    for name in ("data_path", "validation_data_path"):
        path = getattr(train_args, name)
        if path is not None and not Path(path).expanduser().exists():
            raise InvalidData(f"{name}: there is no file {Path(path).expanduser().absolute()}; rows are read from a file on this machine")


def _enter_attempt(run_dir: RunDir, torch_args: TorchrunArguments, train_args: FullTrainingArguments) -> tuple[AttemptDir, Lock]:
    """The attempt's folder, with its arguments written and its lock held."""
    arguments = AttemptArguments(contract=CONTRACT_VERSION, train_args=train_args, torch_args=torch_args)
    if torch_args.node_rank > 0:
        return _join_attempt(run_dir, arguments)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    try:
        with hold(run_dir.path / "launch.lock"):
            attempts = run_dir.attempts()
            for attempt in attempts:
                if is_held(attempt.shim_lock, alone=True) or is_held(attempt.run_lock):
                    raise LaunchFailed(f"attempt {attempt.number} is still running in {run_dir.path}; wait for it, stop it, or use another ckpt_output_dir")
            attempt = run_dir.attempt(attempts[-1].number + 1 if attempts else 1)
            attempt.logs.mkdir(parents=True)
            lock = Lock(attempt.shim_lock)
    except LockHeld as error:
        raise LaunchFailed(f"another run is being started in {run_dir.path} at this moment") from error
    write_json(attempt.arguments, arguments.model_dump(mode="json"))
    return attempt, lock


def _join_attempt(run_dir: RunDir, arguments: AttemptArguments) -> tuple[AttemptDir, Lock]:
    """The attempt that node 0 made for the same arguments and that this node has not joined yet."""
    node = arguments.torch_args.node_rank
    wanted = arguments.model_dump(mode="json")
    wanted["torch_args"]["node_rank"] = 0
    deadline = time.monotonic() + _JOIN_WAIT_S
    while time.monotonic() < deadline:
        for attempt in reversed(run_dir.attempts()):
            mine = attempt.path / f"node-{node}.lock"
            if read_json(attempt.arguments) == wanted and not mine.exists() and not attempt.result.exists() and not attempt.errors():
                return attempt, Lock(mine)
        time.sleep(0.2)
    raise LaunchFailed(
        f"node {node} found no attempt of node 0 in {run_dir.path} within {_JOIN_WAIT_S:.0f} s; all nodes need the same "
        "arguments, and ckpt_output_dir on a file system that they share"
    )


def _run(argv: list[str], attempt: AttemptDir, lock_path: Path, torch_args: TorchrunArguments) -> tuple[int, bool]:
    """Start torchrun and wait; returns its exit code and whether it was stopped by a signal to this process."""
    run_id = str(uuid.uuid4())
    env = {**RANK_ENVIRONMENT, **os.environ, ENV_RUN_ID: run_id, ENV_ATTEMPT: str(attempt.number), ENV_LAUNCHER_LOCK: str(lock_path)}
    with _termination_raises(), attempt.torchrun_log.open("ab") as log:
        try:
            # A session of its own: Ctrl-C in a terminal reaches this process alone, which passes it on once.
            process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise LaunchFailed(f"{argv[0]} could not be started: {error.strerror}; give the trainer's interpreter as python") from error
        try:
            return process.wait(), False
        except _Terminated:
            return _stop(process, attempt, torch_args), True
        except KeyboardInterrupt:
            _stop(process, attempt, torch_args)
            raise
        finally:
            # Ranks live in sessions of their own and would outlive torchrun.
            kill_marked(run_id, attempt.number)
            process.wait()


def _stop(process: subprocess.Popen[bytes], attempt: AttemptDir, torch_args: TorchrunArguments) -> int:
    """Ask for a checkpoint and the end; returns torchrun's exit code, killed when the grace is over."""
    if not attempt.stop.exists():
        write_json(attempt.stop, {"want": "pause"})
    process.terminate()
    try:
        return process.wait(timeout=torch_args.shutdown_timeout_s + _AFTER_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _Terminated(BaseException):
    """SIGTERM arrived."""


@contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGTERM raises _Terminated inside the block, where that is possible and nobody else handles it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminated(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _outcome(run_dir: RunDir, attempt: AttemptDir, code: int, *, stopped: bool) -> RunResult:
    """The run's own record, or the error it ended with."""
    data = read_json(attempt.result)
    if data is not None:
        return _recorded(RunResult.model_validate(data), attempt, code, stopped=stopped)
    for _, error in attempt.errors():
        raise TrainerError.from_json(error)
    if stopped:
        # Stopped before any rank was up: nothing was done, nothing is lost.
        return _nothing_done(run_dir)
    raise _unexplained(attempt, code)


def _recorded(result: RunResult, attempt: AttemptDir, code: int, *, stopped: bool) -> RunResult:
    """What rank 0 recorded, which it does once everything of every rank is written.

    Torchrun exits with 1 after a SIGTERM although every rank saved and ended in order, also when the signal came in the
    last step, so that the run is complete. Whatever else went wrong after the record took nothing away: it is a warning.
    """
    if code == 0 or stopped or result.status == "stopped":
        return result
    told = [f"rank {rank}: {error['message']}" for rank, error in attempt.errors()]
    why = "; ".join(told) or f"see {attempt.logs}"
    warning = f"after training was complete and saved, torchrun ended with exit code {code} ({why})"
    return result.model_copy(update={"warnings": [*result.warnings, warning]})


def _nothing_done(run_dir: RunDir) -> RunResult:
    names = run_dir.checkpoint_ids()
    manifest = (run_dir.manifest(names[-1]) if names else None) or {}
    return RunResult(
        status="stopped",
        want="pause",
        steps=manifest.get("step", 0),
        total_steps=0,
        epochs=manifest.get("epoch", 0.0),
        samples_seen=manifest.get("samples_seen", 0),
        tokens_seen=manifest.get("tokens_seen", 0),
        checkpoint=names[-1] if names else None,
        checkpoint_path=str(run_dir.checkpoint(names[-1])) if names else None,
        train_time_s=0.0,
        warnings=["stopped before the ranks were up"],
    )


def _unexplained(attempt: AttemptDir, code: int) -> TrainerError:
    """The error when no rank left one: from torchrun's own log."""
    tail = _tail(attempt.torchrun_log)
    details = {"log_tail": tail}
    if "No module named" in tail and "torch" in tail:
        return LaunchFailed("the trainer's Python has no torch; install posttrain[train] there, or give another interpreter as python", exit_code=code, details=details)
    if (killed := _KILLED.search(tail)) is not None and int(killed[2]) < 0:
        name = signal.Signals(-int(killed[2])).name
        return Lost(f"rank {killed[1]} was killed by {name} (by the system for lack of memory, perhaps)", rank=int(killed[1]), exit_code=int(killed[2]), details=details)
    if code == 0:
        return LaunchFailed(f"torchrun ended without an error but no rank recorded a result; see {attempt.logs}", exit_code=code, details=details)
    last = tail.strip().splitlines()[-1] if tail.strip() else "no output"
    return LaunchFailed(f"torchrun failed with exit code {code} before any rank could say why: {last}", exit_code=code, details=details)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
