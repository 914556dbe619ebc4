"""Stop requests in a process of their own, since they take over its signals and may end it; nothing here loads torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain_trainer.contract.locks import Lock
from posttrain_trainer.contract.rundir import AttemptDir, write_json

PROGRAM = """
import json, sys, threading
from pathlib import Path
from posttrain_trainer.contract.rundir import AttemptDir
from posttrain_trainer.signals import StopRequests

attempt, rank, world_size, started = AttemptDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "started"

def told(what):
    return lambda value: (attempt.path / f"{what}-{rank}").write_text(json.dumps(value))

stop = StopRequests(attempt, rank, world_size, at_once=told("stopped"), vanished=told("vanished"))
stop.install()
if started:
    stop.wait_for_steps()
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps([stop.pending, stop.want()]), flush=True)
"""


class RankProcess:
    """A rank that waits for lines and answers each with what it knows of stop requests."""

    def __init__(self, folder: Path, *, rank: int = 0, world_size: int = 1, started: bool = False, env: dict[str, str] | None = None) -> None:
        self.attempt = AttemptDir(folder)
        self.rank = rank
        argv = [sys.executable, "-c", PROGRAM, str(folder), str(rank), str(world_size), "started" if started else "starting"]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | (env or {}), start_new_session=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ask(self) -> tuple[bool, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        pending, want = json.loads(self.process.stdout.readline())
        return pending, want

    def ends(self) -> int:
        return self.process.wait(timeout=20)

    def told(self, what: str):
        path = self.attempt.path / f"{what}-{self.rank}"
        return json.loads(path.read_text()) if path.exists() else None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start(tmp_path):
    running: list[RankProcess] = []

    def start(**options) -> RankProcess:
        running.append(RankProcess(tmp_path, **options))
        return running[-1]

    yield start
    for process in running:
        process.close()


def eventually(process: RankProcess) -> tuple[bool, str]:
    """The answer once the thread has seen the signal."""
    deadline = time.monotonic() + 20
    while True:
        answer = process.ask()
        if answer[0] or time.monotonic() > deadline:
            return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_while_training_a_signal_waits_for_the_step_boundary(start, number):
    rank = start(started=True)
    assert rank.ask() == (False, "pause")
    rank.signal(number)
    assert eventually(rank) == (True, "pause")
    assert rank.told("stopped") is None


def test_a_stop_file_alone_is_seen_by_rank_0(start, tmp_path):
    zero, one = start(started=True, world_size=2), start(rank=1, world_size=2, started=True)
    write_json(AttemptDir(tmp_path).stop, {"want": "cancel"})
    assert zero.ask() == (True, "cancel")
    assert one.ask() == (False, "cancel")


def test_before_the_first_step_a_signal_ends_the_rank_at_once(start):
    rank = start()
    rank.signal()
    assert rank.ends() == 0
    assert rank.told("stopped") == "pause"


def test_cancel_ends_the_rank_at_once_even_while_training(start, tmp_path):
    rank = start(started=True)
    write_json(AttemptDir(tmp_path).stop, {"want": "cancel"})
    rank.signal()
    assert rank.ends() == 0
    assert rank.told("stopped") == "cancel"


def test_a_pause_that_becomes_a_cancel_is_obeyed(start, tmp_path):
    rank = start(started=True)
    rank.signal()
    assert eventually(rank) == (True, "pause")
    write_json(AttemptDir(tmp_path).stop, {"want": "cancel"})
    rank.signal()
    assert rank.ends() == 0
    assert rank.told("stopped") == "cancel"


def test_an_unknown_want_keeps_the_work(start, tmp_path):
    rank = start(started=True)
    write_json(AttemptDir(tmp_path).stop, {"want": "dance"})
    assert rank.ask() == (True, "pause")


def test_only_rank_0_records_the_stop(start, tmp_path):
    zero, one = start(world_size=2), start(rank=1, world_size=2)
    one.signal()
    zero.signal()
    assert (zero.ends(), one.ends()) == (0, 0)
    assert zero.told("stopped") == "pause"
    assert one.told("stopped") is None


def test_a_signal_because_another_rank_died_is_not_a_stop(start):
    zero = start(world_size=2)
    zero.signal()  # torchrun does this when rank 1 is gone; rank 1 itself never got it
    assert zero.ends() == 1
    assert zero.told("stopped") is None
    assert zero.told("vanished") == [1]


def test_with_a_stop_file_nobody_is_waited_for(start, tmp_path):
    zero = start(world_size=2)
    write_json(AttemptDir(tmp_path).stop, {"want": "pause"})
    zero.signal()
    assert zero.ends() == 0
    assert zero.told("stopped") == "pause"


def test_a_signal_after_another_rank_told_its_error_adds_nothing(start, tmp_path):
    zero = start(world_size=2)
    write_json(AttemptDir(tmp_path).error(1), {"code": "out_of_memory", "message": "m"})
    zero.signal()
    assert zero.ends() == 1
    assert zero.told("stopped") is None
    assert zero.told("vanished") is None


def test_a_rank_ends_itself_when_its_launcher_is_gone(start, tmp_path):
    lock = Lock(tmp_path / "launcher.lock")
    # The rank is told to kill its parent with it; here that is a shell in between, as torchrun would be.
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {PROGRAM!r}, {str(tmp_path)!r}, '0', '1', 'started']).returncode)"
    env = os.environ | {"POSTTRAIN_LAUNCHER_LOCK": str(lock.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        lock.release()
        assert parent.wait(timeout=20) == -signal.SIGKILL
        assert parent.stdout.read() == b""  # the pipe is closed: the rank is gone as well
    finally:
        parent.kill()
        parent.communicate()
