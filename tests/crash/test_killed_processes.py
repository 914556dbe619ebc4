"""kill -9 of the server's process, the shim and the launcher: nothing runs on unseen, nothing runs twice, nothing is made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.launch.backend import Liveness
from posttrain_trainer.contract import proc
from posttrain_trainer.contract.rundir import read_json, write_json

RANK = """
import signal, sys
from pathlib import Path
from posttrain_trainer.contract import locks
signal.signal(15, signal.SIG_IGN)
lock = locks.Lock(Path(sys.argv[1]), shared=True)
print("rank", flush=True)
while True: signal.pause()
"""
LAUNCHER = f"""
import os, signal, subprocess, sys
for _ in range(2):
    child = subprocess.Popen([sys.executable, "-c", {RANK!r}, sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
print("ranks up", flush=True)
signal.pause()
"""
SERVER = """
import json, os, signal, sys
from pathlib import Path
from posttrain_service.launch.backend import Plan
from posttrain_service.launch.local import LocalBackend
facts = json.loads(sys.argv[1])
for name in ("cwd", "attempt_dir"):
    facts[name] = Path(facts[name])
LocalBackend(trainer_python=Path(sys.executable), stop_grace_s=5.0).start(Plan(**facts))
print("started", flush=True)
signal.pause()
"""


def start(run: Any, attempt: int = 1, **options: Any) -> None:
    run.start(LAUNCHER, str(run.attempt(attempt).run_lock), attempt=attempt, **options)
    run.saw("ranks up", attempt)


def test_a_killed_shim_leaves_orphans_that_are_seen_and_swept(run: Any) -> None:
    start(run)
    assert len(run.alive()) == 4
    assert proc.send(run.shim(), signal.SIGKILL)
    run.until(lambda: run.look().liveness is Liveness.DEAD)
    seen = run.look()
    assert (seen.exit, seen.started, seen.orphans) == (None, True, True)
    assert len(run.alive()) == 3
    assert run.backend.sweep(run.run_dir, 1) == 3
    assert run.alive() == []
    seen = run.look()
    assert (seen.exit, seen.orphans, seen.liveness) == (None, False, Liveness.DEAD)


def test_a_lost_attempt_never_runs_again_and_the_next_one_does(run: Any) -> None:
    start(run)
    assert proc.send(run.shim(), signal.SIGKILL)
    run.until(lambda: run.look().liveness is Liveness.DEAD)
    run.backend.sweep(run.run_dir, 1)
    run.start(LAUNCHER, str(run.attempt().run_lock))
    run.saw("nothing is started")
    run.until(lambda: run.alive() == [])
    start(run, attempt=2)
    assert run.look(2).liveness is Liveness.ALIVE
    run.backend.stop(run.run_dir, 2, "cancel", grace_s=0)
    assert run.exit(2)["leftovers_killed"] >= 2


def test_a_killed_launcher_is_recorded_and_its_ranks_are_killed(run: Any) -> None:
    start(run)
    assert proc.send(run.launcher(), signal.SIGKILL)
    end = run.exit()
    assert (end["reason"], end["exit_code"], end["signal"]) == ("exited", None, signal.SIGKILL)
    assert (end["leftovers_killed"], end["unkillable"]) == (2, 0)
    assert run.alive() == []


def test_a_stopped_shim_does_not_outlive_its_sweep(run: Any) -> None:
    start(run)
    assert proc.send(run.shim(), signal.SIGSTOP)
    assert run.look().liveness is Liveness.ALIVE
    assert run.backend.sweep(run.run_dir, 1) == 4
    assert run.alive() == []
    assert run.look().liveness is Liveness.DEAD


def test_what_was_stopped_by_a_signal_obeys_a_stop_request(run: Any) -> None:
    start(run)
    for identity in run.alive():
        assert proc.send(identity, signal.SIGSTOP)
    run.backend.stop(run.run_dir, 1, "cancel", grace_s=0.2)
    end = run.exit()
    assert (end["reason"], end["stop_want"], end["unkillable"]) == ("stopped", "cancel", 0)  # the ranks ignore SIGTERM
    assert run.alive() == []


@pytest.mark.parametrize("how", ["kill -9", "hang up"])
def test_a_run_goes_on_without_the_server_that_started_it(run: Any, how: str) -> None:
    facts = vars(run.plan(LAUNCHER, str(run.attempt().run_lock)))
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in facts.items()}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(facts)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "started\n"
    run.saw("ranks up")
    # The whole session and process group of the server, as a closing terminal or a supervisor would.
    os.killpg(server.pid, signal.SIGKILL if how == "kill -9" else signal.SIGHUP)
    server.communicate()
    assert run.look().liveness is Liveness.ALIVE
    assert len(run.alive()) == 4
    # Another server process takes over by the files alone.
    run.backend.stop(run.run_dir, 1, "pause", grace_s=0.1)
    end = run.exit()
    assert (end["stop_want"], end["unkillable"]) == ("pause", 0)
    assert run.alive() == []


def test_a_record_of_another_boot_is_dead_and_points_at_nobody(run: Any) -> None:
    start(run)
    record = read_json(run.attempt().run)
    assert proc.send(run.shim(), signal.SIGKILL)
    run.until(lambda: run.look().liveness is Liveness.DEAD)
    record["shim"] = run.alive()[0].to_json() | {"boot_id": "the boot before"}
    write_json(run.attempt().run, record)
    run.backend.stop(run.run_dir, 1, "cancel")
    assert run.look().liveness is Liveness.DEAD
    assert len(run.alive()) == 3
    assert run.backend.sweep(run.run_dir, 1) == 3


def test_starters_that_race_with_a_stop_leave_one_end_and_no_process(run: Any) -> None:
    for attempt in range(1, 5):
        path = run.attempt(attempt).run_lock
        starters = [
            threading.Thread(target=run.start, args=(LAUNCHER, str(path)), kwargs={"attempt": attempt, "grace_s": 0.05})
            for _ in range(2)
        ]
        for thread in starters:
            thread.start()
        run.backend.stop(run.run_dir, attempt, "cancel")
        for thread in starters:
            thread.join()
        end = run.exit(attempt)
        assert end["stop_want"] == "cancel"
        assert end["reason"] in ("stopped", "killed")
        run.until(lambda n=attempt: run.alive(n) == [])
