"""Backend: torchrun on this host, beside a shim that outlives the server.

Nothing is remembered here but what unchanged files said. Whether an attempt lives is asked of its lock, how it ended of its exit.json; process numbers
are used for signals only, and only after identity and marker have been checked, so a forged or outdated record can't
point at an innocent process.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import posttrain_service
import posttrain_trainer
from posttrain_service.errors import LaunchFailed, Unavailable
from posttrain_service.launch.backend import Liveness, Plan, Seen, StopWant
from posttrain_service.launch.plan import make_plan
from posttrain_service.runs.launcher_log import killed_rank
from posttrain_service.runs.records import Records
from posttrain_trainer.contract import cgroup, locks, proc
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, read_json, write_json
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

log = logging.getLogger(__name__)

_SHIM = Path(__file__).with_name("shim.py")
_DETACH_S = 20.0
_SWEEP_S = 10.0


class LocalBackend:
    """See `LaunchBackend`.

    Args:
        trainer_python: The interpreter that has torch and the trainer.
        stop_grace_s: Grace where a request names none.
        cpu_slots: CPU slots of this host; a run on CPU slots gets its share of the cores.
        environ: The environment that jobs pick their variables from.
        cores: CPU cores that jobs may use; None = those this process may use.
        limits: Variables that tell a run this host's quotas, see `registry`.
    """

    def __init__(
        self,
        *,
        trainer_python: Path,
        stop_grace_s: float,
        cpu_slots: int = 1,
        environ: Mapping[str, str] = os.environ,
        cores: int | None = None,
        limits: Mapping[str, str] | None = None,
    ) -> None:
        self._trainer_python = trainer_python
        self._stop_grace_s = stop_grace_s
        self._cpu_slots = cpu_slots
        self._environ = environ
        self._cores = cores or usable_cores()
        self._limits = dict(limits or {})
        self._records = Records()

    def plan(
        self,
        run_id: str,
        attempt: int,
        run_dir: RunDir,
        train_args: FullTrainingArguments,
        torch_args: TorchrunArguments,
        devices: Sequence[str],
    ) -> Plan:
        """See `LaunchBackend.plan`."""
        on_cpu = bool(devices) and all(device.startswith("cpu:") for device in devices)
        share = len(devices) / max(self._cpu_slots, len(devices)) if on_cpu else 1.0
        return make_plan(
            run_id=run_id,
            attempt=attempt,
            run_dir=run_dir,
            train_args=train_args,
            torch_args=torch_args,
            devices=devices,
            trainer_python=str(self._trainer_python),
            environ=self._environ,
            cores=max(1, int(self._cores * share)),
            stop_grace_s=self._stop_grace_s,
            limits=self._limits,
        )

    def start(self, plan: Plan) -> None:
        """See `LaunchBackend.start`."""
        attempt = AttemptDir(plan.attempt_dir)
        try:
            attempt.logs.mkdir(parents=True, exist_ok=True)
            if not attempt.run.exists():  # ranks of an attempt that already runs may be reading it
                write_json(attempt.arguments, plan.arguments)
            with attempt.torchrun_log.open("ab", buffering=0) as output:
                # Waits only for the shim's first process, which ends as soon as it has forked.
                code = subprocess.Popen(
                    _shim_command(plan), env=plan.env, cwd="/", start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                ).wait(_DETACH_S)  # fmt: skip
        except OSError as error:
            raise LaunchFailed(f"attempt {plan.attempt} of run {plan.run_id} could not be started: {error}") from error
        except subprocess.TimeoutExpired:
            # Slow is not failed: the lock lets it run once at most, and `look` will tell.
            log.warning("the shim of run %s has not detached within %g s", plan.run_id, _DETACH_S)
            return
        # Another starter's shim may have run the attempt meanwhile, and at its end have killed ours with the rest.
        if code != 0 and not attempt.run.exists():
            raise LaunchFailed(
                f"the shim of attempt {plan.attempt} of run {plan.run_id} ended with {code}; see its torchrun log"
            )

    def look(self, run_dir: RunDir, attempt: int) -> Seen:
        """See `LaunchBackend.look`."""
        paths = run_dir.attempt(attempt)
        problems: list[str] = []
        # Order matters. A shim takes its lock before it writes run.json, so that run.json has to be read first: one that
        # starts while this looks would else seem to have started and to be gone. And it writes exit.json before it lets
        # go of the lock, so who finds the lock free and then no exit.json knows that there never will be one.
        run = self._read(paths.run, problems)
        liveness, orphans = _liveness(paths, problems)
        record = None if liveness is Liveness.ALIVE else self._read(paths.exit, problems)
        if run is None and record is not None:  # it came and went in between
            run = self._read(paths.run, problems)
        if run is not None and (run.get("run_id"), run.get("attempt")) != (run_dir.path.name, attempt):
            problems.append(f"run.json is of run {run.get('run_id')!r}, attempt {run.get('attempt')!r}")
            run = None
        if liveness is Liveness.DEAD and record is None and not paths.shim_lock.exists() and _shim_of(run, run_dir, attempt):
            problems.append("shim.lock was deleted while its holder lives")
            liveness = Liveness.ALIVE
        beat = self._read(paths.heartbeat, problems)
        # How it ended is asked of a run that has: of live ones, which are looked at all the time, it would tell nothing.
        ended = liveness is Liveness.DEAD
        result = self._read(paths.result, problems) if ended else None
        return Seen(
            liveness=liveness,
            exit=record,
            started=run is not None,
            orphans=orphans,
            heartbeat=beat,
            silence_s=_silence_s(run, beat),
            result=result,
            error=_first_error(paths, problems) or _unsaid_error(paths, record, result) if ended else None,
            launched_at=_number(run, "started_at"),
            problem="; ".join(problems) or None,
        )

    def stop(self, run_dir: RunDir, attempt: int, want: StopWant, *, grace_s: float | None = None) -> None:
        """See `LaunchBackend.stop`."""
        paths = run_dir.attempt(attempt)
        if paths.exit.exists():
            return
        wake = signal.SIGUSR1
        asked = _read(paths.stop, [])
        if asked is None or asked.get("want") not in ("cancel", want):
            try:
                paths.path.mkdir(parents=True, exist_ok=True)
                write_json(paths.stop, {"v": 1, "want": want, "grace_s": grace_s})
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # A full disk must not keep a run alive: without the file, SIGTERM is the request.
                log.warning("no space for stop.json of run %s; its shim is told by SIGTERM", run_dir.path.name)
                wake = signal.SIGTERM
        shim = _shim_of(_read(paths.run, []), run_dir, attempt)
        if shim is not None:
            proc.send(shim, wake)  # else it isn't up yet and reads stop.json first, or it is dead
            proc.send(shim, signal.SIGCONT)  # stopped, it would not see the request

    def sweep(self, run_dir: RunDir, attempt: int) -> int:
        """See `LaunchBackend.sweep`."""
        paths = run_dir.attempt(attempt)
        killed = proc.kill_marked(run_dir.path.name, attempt, timeout_s=_SWEEP_S)
        # What gave its marker up is still in the attempt's control group. The name is checked, not believed.
        if isinstance(group := (_read(paths.run, []) or {}).get("cgroup"), str):
            cgroup.kill(Path(group), run_dir.path.name, attempt, timeout_s=_SWEEP_S)
        held = locks.is_held(paths.run_lock) or locks.is_held(paths.shim_lock, alone=True)
        if killed.left or held:
            pids = ", ".join(str(identity.pid) for identity in killed.left) or "of unknown number"
            raise Unavailable(
                f"processes of run {run_dir.path.name} are still there after SIGKILL ({pids}); its devices stay taken",
                code="still_running",
            )
        return killed.num_killed


    def _read(self, path: Path, problems: list[str]) -> dict[str, Any] | None:
        return _read(path, problems, self._records.read)


def usable_cores() -> int:
    """CPU cores this process may use: its affinity, and a container's quota where there is one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # no such call on macOS
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores


def _shim_command(plan: Plan) -> list[str]:
    # Where an installed or editable package lies is known here; the isolated interpreter wouldn't find it.
    packages = [posttrain_trainer.__file__, posttrain_service.__file__]
    roots = os.pathsep.join(dict.fromkeys(str(Path(file).parents[1]) for file in packages))
    order = [str(plan.attempt_dir), plan.run_id, str(plan.cwd), str(plan.grace_s), *plan.argv]
    return [sys.executable, "-I", "-S", str(_SHIM), roots, *order]


def _liveness(paths: AttemptDir, problems: list[str]) -> tuple[Liveness, bool]:
    """Whether the shim lives, and whether ranks live without it."""
    try:
        if locks.is_held(paths.shim_lock, alone=True):
            return Liveness.ALIVE, False
        return Liveness.DEAD, locks.is_held(paths.run_lock)
    except OSError as error:
        problems.append(f"locks can't be tested: {error.strerror or error}")
        return Liveness.UNKNOWN, False


def _shim_of(run: dict[str, Any] | None, run_dir: RunDir, attempt: int) -> proc.Identity | None:
    """The shim that a run.json names, if that process lives and was started for this very attempt."""
    shim = proc.Identity.from_json((run or {}).get("shim"))
    return shim if shim is not None and proc.carries(shim, run_dir.path.name, attempt) else None


def _silence_s(run: dict[str, Any] | None, beat: dict[str, Any] | None) -> float | None:
    """Seconds since the last beat by the monotonic clock, which all processes of one boot share."""
    shim, written = proc.Identity.from_json((run or {}).get("shim")), _number(beat, "monotonic")
    if shim is None or written is None or shim.boot_id != proc.boot_id():
        return None
    silence_s = time.monotonic() - written
    return silence_s if silence_s >= 0 else None


def _first_error(paths: AttemptDir, problems: list[str]) -> dict[str, Any] | None:
    """The error that was written first: ranks that fail because another did have lower numbers as often as higher."""
    found = []
    for path in paths.path.glob("error-rank-*.json"):
        record = _read(path, problems)
        if record is not None:
            written = path.stat(follow_symlinks=False).st_mtime_ns
            found.append((written, (len(path.name), path.name), record))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _unsaid_error(paths: AttemptDir, end: dict[str, Any] | None, result: dict[str, Any] | None) -> dict[str, Any] | None:
    """The error of a rank that a signal ended: torchrun knows it. What was killed at the end of a stop is none."""
    if end is None or result is not None or end.get("reason") != "exited" or not end.get("exit_code"):
        return None
    return killed_rank(paths.torchrun_log)


def _read(
    path: Path, problems: list[str], read: Callable[[Path], Any | None] = read_json
) -> dict[str, Any] | None:
    """A record; None when it is missing or not to be believed, which is then added to `problems`."""
    try:
        record = read(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {error}")
        return None
    if record is not None and not isinstance(record, dict):
        problems.append(f"{path.name} holds no JSON object")
        return None
    return record


def _number(record: dict[str, Any] | None, key: str) -> float | None:
    value = (record or {}).get(key)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # JSON has integers that no float can hold
        return None
