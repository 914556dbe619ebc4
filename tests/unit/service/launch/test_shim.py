"""The real shim with small stand-ins for torchrun: what it starts, obeys, kills and records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain_service
import posttrain_trainer
from posttrain_service.launch import shim
from posttrain_service.launch.backend import Liveness
from posttrain_service.launch.local import LocalBackend, _shim_command
from posttrain_service.runs import tail
from posttrain_trainer.contract import locks, logcap, proc
from posttrain_trainer.contract.rundir import read_json, write_json

WAITS = "import signal\nprint('up', flush=True)\nsignal.pause()"
IGNORES = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\nwhile True: time.sleep(60)"
OBEYS = """
import signal, sys
def stop(*_):
    print("stopping", flush=True)
    sys.exit(1)
signal.signal(15, stop)
print("up", flush=True)
while True: signal.pause()
"""
# As torchrun and its ranks are: each child in a session of its own, one ignoring SIGTERM, one a double-forked daemon.
TREE = f"""
import os, signal, subprocess, sys
ignores = {IGNORES!r}
children = [subprocess.Popen([sys.executable, "-c", ignores], start_new_session=True, stdout=subprocess.PIPE) for _ in range(2)]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "print('daemon', flush=True)\\n" + ignores])
    os._exit(0)
os.wait()
for child in children: child.stdout.readline()
print("tree", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "signum"),
    [("", 0, None), ("raise SystemExit(7)", 7, None), ("import os; os.kill(os.getpid(), 9)", None, 9), ("1/0", 1, None)],
)
def test_the_exit_status_is_recorded_with_nobody_waiting(run: Any, code: str, exit_code: int, signum: int) -> None:
    before = time.time()
    run.start(code)
    end = run.exit()
    assert (end["exit_code"], end["signal"]) == (exit_code, signum)
    assert (end["v"], end["reason"], end["stop_want"]) == (1, "exited", None)
    assert (end["leftovers_killed"], end["unkillable"]) == (0, 0)
    assert before <= end["started_at"] <= end["ended_at"] <= time.time()


def test_run_json_says_who_runs_what(run: Any) -> None:
    run.start(WAITS)
    run.saw("up")
    run.launcher()
    record = read_json(run.attempt().run)
    assert (record["v"], record["run_id"], record["attempt"]) == (1, run.run_id, 1)
    assert record["argv"] == run.plan(WAITS).argv
    assert record["shim"]["boot_id"] == proc.own().boot_id
    launcher = proc.Identity.from_json(record["torchrun"])
    assert launcher is not None
    assert launcher in run.alive()
    seen = run.look()
    assert (seen.liveness, seen.started, seen.exit) == (Liveness.ALIVE, True, None)
    assert seen.launched_at == record["started_at"]


def test_an_obedient_launcher_is_stopped_within_its_grace(run: Any) -> None:
    run.start(OBEYS)
    run.saw("up")
    run.backend.stop(run.run_dir, 1, "pause")
    end = run.exit()
    assert (end["reason"], end["stop_want"], end["exit_code"]) == ("stopped", "pause", 1)
    assert b"stopping" in run.attempt().torchrun_log.read_bytes()


@pytest.mark.parametrize("code", [IGNORES, TREE], ids=["ignores", "tree"])
def test_what_ignores_the_request_is_killed_when_the_grace_is_over(run: Any, code: str) -> None:
    run.start(code, grace_s=0.3)
    run.saw("tree" if code == TREE else "up")
    run.backend.stop(run.run_dir, 1, "cancel")
    end = run.exit()
    assert run.alive() == []
    assert end["reason"] == ("stopped" if code == TREE else "killed")
    assert end["signal"] == (signal.SIGTERM if code == TREE else signal.SIGKILL)
    assert end["leftovers_killed"] == (3 if code == TREE else 1)  # two ranks and the daemon; or the launcher itself
    assert end["unkillable"] == 0


def test_what_a_finished_launcher_leaves_behind_is_killed(run: Any) -> None:
    run.start(TREE.replace("signal.pause()", "sys.exit(0)"))
    end = run.exit()
    assert run.alive() == []
    assert (end["reason"], end["exit_code"], end["leftovers_killed"]) == ("exited", 0, 3)


def test_a_descendant_without_the_marker_is_killed_too(run: Any) -> None:
    hidden = "import os, signal\nprint('hidden', os.getpid(), flush=True)\nsignal.pause()"
    run.start(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {hidden!r}], env={{}}, start_new_session=True)")
    end = run.exit()
    assert (end["exit_code"], end["leftovers_killed"]) == (0, 1)
    words = run.attempt().torchrun_log.read_text().split()
    assert proc.identify(int(words[words.index("hidden") + 1])) is None


def test_a_helper_that_is_about_to_end_is_waited_for(run: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    helper = f"open({str(fifo)!r}).read(); print('uploaded', flush=True)"
    run.start(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {helper!r}])\nprint('over', flush=True)")
    run.saw("over")
    fifo.write_text("")  # blocks until the helper has opened it
    assert run.exit()["leftovers_killed"] == 0
    assert b"uploaded" in run.attempt().torchrun_log.read_bytes()


def test_a_pause_that_becomes_a_cancel_is_hurried(run: Any) -> None:
    run.start(IGNORES, grace_s=600)
    run.saw("up")
    run.backend.stop(run.run_dir, 1, "pause")
    run.saw("stop requested (pause)")
    run.backend.stop(run.run_dir, 1, "cancel", grace_s=0)
    run.backend.stop(run.run_dir, 1, "pause")  # comes too late to count
    end = run.exit()
    assert (end["reason"], end["stop_want"]) == ("killed", "cancel")
    assert end["ended_at"] - end["started_at"] < 60


def test_the_grace_of_a_stop_request_counts(run: Any) -> None:
    run.start(IGNORES, grace_s=600)
    run.saw("up")
    run.backend.stop(run.run_dir, 1, "pause", grace_s=0.1)
    assert run.exit()["reason"] == "killed"


def test_sigterm_alone_stops_it_and_a_wake_up_alone_does_not(run: Any) -> None:
    run.start(OBEYS)
    run.saw("up")
    for signum in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2):
        assert proc.send(run.shim(), signum)
    assert proc.send(run.shim(), signal.SIGTERM)
    end = run.exit()
    assert (end["reason"], end["stop_want"]) == ("stopped", None)


def test_a_lost_signal_loses_no_stop_request(run: Any) -> None:
    run.start(OBEYS)
    run.saw("up")
    write_json(run.attempt().stop, {"want": "cancel"})  # and nobody signals
    assert run.exit()["stop_want"] == "cancel"


@pytest.mark.parametrize("content", ["not json", '"cancel"', '{"want": "dance", "grace_s": "long"}'])
def test_an_odd_stop_request_stops_without_a_want(run: Any, content: str) -> None:
    run.start(OBEYS)
    run.saw("up")
    run.attempt().stop.write_text(content)
    end = run.exit()
    assert (end["reason"], end["stop_want"]) == ("stopped", None)


def test_a_request_made_before_the_start_keeps_it_from_starting(run: Any) -> None:
    run.backend.stop(run.run_dir, 1, "cancel")
    run.start("print('ran', flush=True)")
    end = run.exit()
    assert (end["reason"], end["stop_want"], end["exit_code"], end["signal"]) == ("stopped", "cancel", None, None)
    assert b"ran" not in run.attempt().torchrun_log.read_bytes()


@pytest.mark.parametrize("fault", ["program", "cwd"])
def test_a_launcher_that_cannot_be_started_is_told(run: Any, tmp_path: Path, fault: str) -> None:
    plan = run.plan("")
    if fault == "program":
        plan.argv[0] = str(tmp_path / "no-python")
    else:
        object.__setattr__(plan, "cwd", tmp_path / "gone")
    run.backend.start(plan)
    end = run.exit()
    assert (end["reason"], end["exit_code"], end["signal"]) == ("launch_failed", None, None)
    assert "No such file or directory" in end["message"]
    assert "No such file or directory" in run.attempt().torchrun_log.read_text()


def test_one_of_three_racing_shims_runs_and_a_later_one_does_not(run: Any) -> None:
    count = run.run_dir.path / "count"
    code = f"open({str(count)!r}, 'a').write('x')"
    for attempt in range(1, 4):
        threads = [threading.Thread(target=run.start, args=(code,), kwargs={"attempt": attempt}) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run.exit(attempt)
        run.until(lambda n=attempt: run.alive(n) == [])
        assert count.read_text() == "x" * attempt
    run.start(code, attempt=1)
    run.saw("nothing is started")
    run.until(lambda: run.alive() == [])
    assert count.read_text() == "xxx"


def test_printing_much_blocks_nothing_with_nobody_reading(run: Any) -> None:
    run.start("import sys\nfor _ in range(4096): sys.stderr.write('x' * 1023 + '\\n')\nprint('printed')")
    assert run.exit()["exit_code"] == 0
    log = run.attempt().torchrun_log.read_bytes()
    assert log.count(b"x" * 1023 + b"\n") == 4096
    assert b"printed" in log


def test_the_job_has_default_signals_its_own_session_and_no_open_files(run: Any) -> None:
    code = (
        "import json, os, signal\n"
        "odd = [s for s in (1, 2, 10, 15, 17) if signal.getsignal(s) is signal.SIG_IGN]\n"
        "facts = {'odd': odd, 'blocked': len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),\n"
        "  'session': os.getsid(0) == os.getpid(), 'fds': sorted(int(f) for f in os.listdir('/proc/self/fd')),\n"
        "  'in': os.readlink('/proc/self/fd/0'), 'cwd': os.getcwd(), 'env': dict(os.environ)}\n"
        "print('FACTS', json.dumps(facts), flush=True)"
    )
    plan = run.plan(code)
    # Started as a server under nohup, from a thread that blocks signals, would start it.
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        run.backend.start(plan)
    finally:
        signal.signal(signal.SIGHUP, old)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    run.exit()
    line = next(line for line in run.attempt().torchrun_log.read_text().splitlines() if line.startswith("FACTS "))
    facts = json.loads(line.removeprefix("FACTS "))
    assert (facts["odd"], facts["blocked"], facts["session"]) == ([], 0, True)
    assert facts["fds"] == [0, 1, 2, 3]  # 3 is the listing of the folder itself
    assert (facts["in"], facts["cwd"]) == ("/dev/null", str(plan.cwd))
    assert {name: value for name, value in facts["env"].items() if name != "LC_CTYPE"} == plan.env


def test_the_shim_is_nobodys_child_and_in_its_own_session(run: Any) -> None:
    run.start(WAITS)
    run.saw("up")
    pid = run.shim().pid
    assert os.getsid(pid) not in (os.getsid(0), pid)  # a session leader could get a terminal again
    assert pid not in [identity.pid for identity in proc.descendants(os.getpid())]


def test_the_shim_loads_little_and_starts_in_milliseconds(run: Any) -> None:
    code = (
        "import runpy, sys, time\n"
        "begin = time.perf_counter(); sys.argv = sys.argv[1:]; sys.path += sys.argv[1].split(':')\n"
        "runpy.run_path(sys.argv[0], run_name='shim')\n"
        "heavy = {'pydantic', 'torch', 'fastapi', 'sqlalchemy', 'psutil', 'subprocess', 'asyncio', 'logging'}\n"
        "print(sorted(heavy & set(sys.modules)), [m for m in sys.modules if m.startswith('posttrain')], time.perf_counter() - begin)"
    )
    command = _shim_command(run.plan(""))
    argv = [*command[:3], "-c", code, *command[3:]]
    out = subprocess.run(argv, capture_output=True, text=True, check=True, env={}).stdout
    assert out.startswith("[] ['posttrain_trainer', ")
    assert "posttrain_service" not in out
    assert float(out.split()[-1]) < 2.0  # 0.04 s on an idle machine


def test_a_full_disk_does_not_keep_the_end_from_being_recorded(run: Any) -> None:
    attempt = run.attempt()
    attempt.path.mkdir(parents=True)
    reserve = shim._set_aside(attempt)
    inode, blocks = reserve.stat().st_ino, reserve.stat().st_blocks
    assert blocks * 512 >= shim._RESERVE_BYTES
    shim._write_exit(attempt, reserve, shim.End(started_at=1.0, reason="launch_failed", message="é" * 10_000))
    assert (attempt.exit.stat().st_ino, attempt.exit.stat().st_blocks) == (inode, blocks)
    end = read_json(attempt.exit)
    assert (end["reason"], end["message"]) == ("launch_failed", "é" * 500)
    assert [path.name for path in attempt.path.iterdir()] == ["exit.json"]


def test_a_fault_of_the_shim_itself_leaves_nobody_behind(run: Any) -> None:
    run.start(IGNORES, grace_s=600)
    run.saw("up")
    run.launcher()
    run.attempt().stop.mkdir()  # reading it fails
    end = run.exit()
    assert end["reason"] == "supervision_failed"
    assert "NotPlain" in end["message"]
    assert run.alive() == []


def test_the_lock_is_held_until_the_end_is_recorded(run: Any) -> None:
    run.start(WAITS)
    run.saw("up")
    assert locks.is_held(run.attempt().shim_lock)
    run.backend.stop(run.run_dir, 1, "cancel")
    run.until(run.attempt().exit.exists)
    run.until(lambda: not locks.is_held(run.attempt().shim_lock))
    assert isinstance(run.backend, LocalBackend)
    assert run.look().liveness is Liveness.DEAD


def test_both_packages_are_found_wherever_they_lie() -> None:
    roots = {str(Path(package.__file__).parents[1]) for package in (posttrain_trainer, posttrain_service)}
    assert roots <= set(sys.path)


def test_a_run_that_writes_without_end_fills_no_disk(run: Any) -> None:
    # A rank has its own log open as torchrun's output is: for appending.
    code = """
import os, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
for number in range(40):
    os.write(log, (b"%06d" % number) * 2000 + b"\\n")
while os.fstat(log).st_size > 65536: time.sleep(0.01)
os.write(log, b"the last word\\n")
"""
    rank_log = run.attempt().rank_log(0)
    plan = run.plan(code, str(rank_log))
    run.backend.start(replace(plan, env=plan.env | {logcap.ENV_LOG_QUOTA: "65536"}))
    assert run.exit()["exit_code"] == 0
    assert rank_log.stat().st_size <= 65536
    assert tail.tail(rank_log, 1).data == b"the last word\n"
    assert tail.tail(rank_log, 1).end == 40 * 12001 + len(b"the last word\n")
    assert b"older output was dropped here" in rank_log.read_bytes()[:200]
