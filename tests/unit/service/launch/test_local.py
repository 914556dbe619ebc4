"""What the local backend sees, asks and refuses, with records put there by hand; no process is started here but one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.errors import LaunchFailed, Unavailable
from posttrain_service.launch import local
from posttrain_service.launch.backend import LaunchBackend, Liveness, Seen
from posttrain_service.launch.local import LocalBackend, usable_cores
from posttrain_trainer.contract import locks, proc
from posttrain_trainer.contract.rundir import read_json, write_json

SIGNALLED = "import signal, sys\nfor s in (10, 15): signal.signal(s, lambda n, _: sys.exit(n))\nprint('up', flush=True)\nwhile True: signal.pause()"


@pytest.fixture
def stand_in(run: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with the run's marker that exits with the number of the signal it gets: as the shim in run.json."""
    process = start_marked(run.run_id, "1")
    yield process
    process.kill()
    process.communicate()


def start_marked(run_id: str, attempt: str) -> subprocess.Popen[str]:
    env = {**os.environ, "POSTTRAIN_JOB_UUID": run_id, "POSTTRAIN_ATTEMPT": attempt}
    process = subprocess.Popen([sys.executable, "-c", SIGNALLED], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def write_run(run: Any, pid: int, **changes: Any) -> None:
    identity = proc.identify(pid)
    assert identity is not None
    run.attempt().path.mkdir(parents=True, exist_ok=True)
    record = {"v": 1, "run_id": run.run_id, "attempt": 1, "shim": identity.to_json(), "torchrun": None, "started_at": 12.5}
    write_json(run.attempt().run, record | changes)


def test_the_local_backend_is_a_launch_backend(backend: LocalBackend) -> None:
    checked: LaunchBackend = backend
    for name in ("plan", "start", "look", "stop", "sweep"):
        assert callable(getattr(checked, name))


def test_nothing_there_is_dead_and_not_started(run: Any) -> None:
    assert run.look() == Seen(Liveness.DEAD)
    assert run.backend.sweep(run.run_dir, 1) == 0
    assert list(run.run_dir.path.iterdir()) == []


def test_a_held_lock_is_alive_and_a_free_one_without_exit_dead(run: Any) -> None:
    attempt = run.attempt()
    attempt.path.mkdir(parents=True)
    with locks.hold(attempt.shim_lock):
        write_json(attempt.exit, {"exit_code": 0})
        assert run.look() == Seen(Liveness.ALIVE)  # an exit.json counts when its writer is gone
        attempt.exit.unlink()
    assert run.look() == Seen(Liveness.DEAD)
    with locks.hold(attempt.run_lock, shared=True):
        assert run.look() == Seen(Liveness.DEAD, orphans=True)
        with locks.hold(attempt.shim_lock):
            assert run.look() == Seen(Liveness.ALIVE)
    write_json(attempt.exit, {"exit_code": 0})
    assert run.look() == Seen(Liveness.DEAD, exit={"exit_code": 0})


def test_a_shim_that_starts_during_the_look_is_not_taken_for_a_lost_one(run: Any, stand_in: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[locks.Lock] = []
    really = locks.is_held

    def start_after(path: Path, **options: bool) -> bool:
        held = really(path, **options)
        if not started:
            write_run(run, stand_in.pid)
            started.append(locks.Lock(run.attempt().shim_lock))
        return held

    monkeypatch.setattr(locks, "is_held", start_after)
    assert run.look() == Seen(Liveness.DEAD), "as before its start; not started and gone"
    seen = run.look()
    assert (seen.liveness, seen.started) == (Liveness.ALIVE, True)
    started[0].release()


def test_a_run_that_comes_and_goes_during_the_look_is_seen_whole(run: Any, stand_in: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    really = locks.is_held

    def run_whole(path: Path, **options: bool) -> bool:
        held = really(path, **options)
        write_run(run, stand_in.pid)
        write_json(run.attempt().exit, {"exit_code": 0})
        return held

    monkeypatch.setattr(locks, "is_held", run_whole)
    seen = run.look()
    assert (seen.liveness, seen.started, seen.exit) == (Liveness.DEAD, True, {"exit_code": 0})


def test_locks_that_cannot_be_tested_say_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_path: Path, **_: bool) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "is_held", fails)
    seen = run.look()
    assert seen.liveness is Liveness.UNKNOWN
    assert seen.problem == "locks can't be tested: No locks available"


def test_all_records_are_read(run: Any, stand_in: subprocess.Popen[str]) -> None:
    attempt = run.attempt()
    write_run(run, stand_in.pid)
    write_json(attempt.heartbeat, {"phase": "train", "step": 2})
    write_json(attempt.result, {"status": "stopped"})
    write_json(attempt.error(0), {"rank": 0, "message": "connection closed by peer"})
    write_json(attempt.error(11), {"rank": 11, "message": "out of memory"})
    os.utime(attempt.error(11), ns=(1, 1))  # rank 11 failed first, the other because of it
    with locks.hold(attempt.shim_lock):
        live = run.look()
    assert (live.started, live.heartbeat, live.result, live.error) == (True, {"phase": "train", "step": 2}, None, None)
    seen = run.look()
    assert (seen.started, seen.launched_at, seen.problem) == (True, 12.5, None)
    assert seen.heartbeat == {"phase": "train", "step": 2}
    assert seen.result == {"status": "stopped"}
    assert seen.error == {"rank": 11, "message": "out of memory"}


@pytest.mark.parametrize("content", ["{torn", "[]", "\udcff"])
def test_an_altered_record_is_named_and_not_believed(run: Any, content: str) -> None:
    attempt = run.attempt()
    attempt.path.mkdir(parents=True)
    for path in (attempt.exit, attempt.run, attempt.heartbeat, attempt.result, attempt.error(0)):
        path.write_bytes(content.encode(errors="surrogateescape"))
    seen = run.look()
    assert (seen.liveness, seen.started) == (Liveness.DEAD, False)
    assert (seen.exit, seen.heartbeat, seen.result, seen.error) == (None, None, None, None)
    assert seen.problem is not None
    for name in ("exit.json", "run.json", "heartbeat.json", "result.json", "error-rank-0.json"):
        assert name in seen.problem


def test_another_runs_record_starts_nothing(run: Any, stand_in: subprocess.Popen[str]) -> None:
    write_run(run, stand_in.pid, run_id="another")
    seen = run.look()
    assert not seen.started
    assert seen.problem == "run.json is of run 'another', attempt 1"


def test_a_deleted_lock_file_does_not_make_a_living_shim_dead(run: Any, stand_in: subprocess.Popen[str]) -> None:
    write_run(run, stand_in.pid)
    seen = run.look()
    assert (seen.liveness, seen.problem) == (Liveness.ALIVE, "shim.lock was deleted while its holder lives")
    stand_in.kill()
    stand_in.wait()
    assert run.look().liveness is Liveness.DEAD


def test_a_stop_request_is_written_then_told_to_the_shim(run: Any, stand_in: subprocess.Popen[str]) -> None:
    write_run(run, stand_in.pid)
    run.backend.stop(run.run_dir, 1, "pause", grace_s=7.0)
    assert stand_in.wait(20) == signal.SIGUSR1
    assert read_json(run.attempt().stop) == {"v": 1, "want": "pause", "grace_s": 7.0}
    for want, stays in (("pause", "pause"), ("cancel", "cancel"), ("cancel", "cancel"), ("pause", "cancel")):
        run.backend.stop(run.run_dir, 1, want)
        assert read_json(run.attempt().stop)["want"] == stays


def test_an_ended_attempt_is_not_asked_to_stop(run: Any, stand_in: subprocess.Popen[str]) -> None:
    write_run(run, stand_in.pid)
    write_json(run.attempt().exit, {"exit_code": 0})
    run.backend.stop(run.run_dir, 1, "cancel")
    assert not run.attempt().stop.exists()
    assert stand_in.poll() is None


def test_a_full_disk_does_not_keep_a_run_from_being_stopped(
    run: Any, stand_in: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(run, stand_in.pid)

    def full(_path: Path, _data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local, "write_json", full)
    run.backend.stop(run.run_dir, 1, "cancel")
    assert stand_in.wait(20) == signal.SIGTERM


@pytest.mark.parametrize("forgery", ["stranger", "another attempt", "another run", "recycled", "another boot", "no identity", "init"])
def test_a_forged_record_never_gets_an_innocent_process_signalled(run: Any, forgery: str) -> None:
    run_id, attempt = {
        "stranger": ("", ""), "another run": ("11111111-1111-4111-8111-111111111111", "1"), "another attempt": (run.run_id, "2"),
    }.get(forgery, (run.run_id, "1"))  # fmt: skip
    innocent = start_marked(run_id, attempt)
    try:
        identity = proc.identify(innocent.pid)
        assert identity is not None
        shim: Any = identity.to_json()
        match forgery:
            case "recycled":
                shim["start"] -= 1
            case "another boot":
                shim["boot_id"] = "another"
            case "no identity":
                shim = {"pid": str(innocent.pid)}
            case "init":
                shim["pid"] = 1
        write_run(run, innocent.pid, shim=shim)
        run.backend.stop(run.run_dir, 1, "cancel")
        assert run.look().liveness is Liveness.DEAD
        if forgery in ("stranger", "another attempt", "another run"):
            assert run.backend.sweep(run.run_dir, 1) == 0
        # A signal would have made it end; it still answers one sent for the purpose.
        assert innocent.poll() is None
        os.kill(innocent.pid, signal.SIGTERM)
        assert innocent.wait(20) == signal.SIGTERM
    finally:
        innocent.kill()
        innocent.communicate()


def test_a_sweep_takes_this_attempts_processes_only(run: Any, stand_in: subprocess.Popen[str]) -> None:
    other = start_marked(run.run_id, "2")
    try:
        assert run.backend.sweep(run.run_dir, 1) == 1
        assert stand_in.wait(20) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()


def test_a_sweep_that_leaves_something_is_an_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run.attempt().path.mkdir(parents=True)
    with locks.hold(run.attempt().run_lock, shared=True), pytest.raises(Unavailable, match="devices stay taken") as caught:
        run.backend.sweep(run.run_dir, 1)
    assert caught.value.code == "still_running"
    immortal = proc.own()
    monkeypatch.setattr(proc, "kill_marked", lambda *_args, **_options: proc.Killed(3, (immortal,)))
    with pytest.raises(Unavailable, match=f"\\({immortal.pid}\\)"):
        run.backend.sweep(run.run_dir, 1)


def test_a_shim_that_cannot_be_started_is_a_failed_launch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SHIM", Path("/nowhere/shim.py"))
    with pytest.raises(LaunchFailed, match="ended with 2; see its torchrun log"):
        run.start("")
    assert "can't open file" in run.attempt().torchrun_log.read_text()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchFailed, match="No such file"):
        run.start("")
    run.attempt(2).path.parent.joinpath("2").write_text("in the way")
    with pytest.raises(LaunchFailed, match=r"exists|Not a directory"):
        run.start("", attempt=2)


def test_a_start_that_lost_the_race_is_no_failure(run: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run, stand_in.pid)
    monkeypatch.setattr(local, "_SHIM", Path("/nowhere/shim.py"))
    run.start("")
    assert "can't open file" in run.attempt().torchrun_log.read_text()


def test_arguments_are_written_before_the_ranks_may_read_them(run: Any) -> None:
    plan = run.plan(f"print('ARGS', open({str(run.attempt().arguments)!r}).read(), flush=True)")
    plan.arguments["train_args"] = {"model_path": "/m"}
    run.backend.start(plan)
    assert run.exit()["exit_code"] == 0
    assert 'ARGS {"contract": 1, "train_args": {"model_path": "/m"}}' in run.attempt().torchrun_log.read_text()
    plan.arguments["train_args"] = {"model_path": "/other"}
    run.backend.start(plan)
    assert read_json(run.attempt().arguments)["train_args"] == {"model_path": "/m"}


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("kind", ["pipe", "deep", "huge"])
def test_an_odd_record_of_a_rank_is_a_problem_of_its_attempt_only(run: Any, kind: str) -> None:
    folder = run.attempt().path
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / "error-rank-7.json")
    elif kind == "deep":
        (folder / "error-rank-7.json").write_text("[" * 200_000)
    else:
        (folder / "heartbeat.json").write_text('{"monotonic": 1' + "0" * 400 + "}")
    seen = run.look()
    assert seen.error is None
    assert (seen.problem is None) == (kind == "huge")
