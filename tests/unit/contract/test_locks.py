from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from posttrain_trainer.contract import locks

HOLDER = """
import sys
from pathlib import Path
from posttrain_trainer.contract import locks
lock = locks.Lock(Path(sys.argv[1]), shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.read()
"""


def holder(path: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize("how", ["exclusive", "shared"])
def test_a_lock_is_free_as_soon_as_its_holder_is_killed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.lock"
    assert not locks.is_held(path)
    process = holder(path, how)
    assert locks.is_held(path)
    end(process)
    assert not locks.is_held(path)
    with locks.hold(path, wait_s=0):
        assert locks.is_held(path)
    assert not locks.is_held(path)


def test_exclusive_excludes_all_and_shared_only_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locks.hold(path, shared=True), locks.hold(path, shared=True, wait_s=0), pytest.raises(locks.LockHeld):
        locks.Lock(path, wait_s=0)
    with locks.hold(path), pytest.raises(locks.LockHeld, match=r"a\.lock is held"):
        locks.Lock(path, shared=True, wait_s=0.02)


def test_two_shared_holders_are_held_until_the_last_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    first, second = holder(path, "shared"), holder(path, "shared")
    end(first)
    assert locks.is_held(path)
    end(second)
    assert not locks.is_held(path)


def test_testing_never_turns_a_lone_holder_away_nor_makes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shim.lock"
    assert not locks.is_held(path)
    assert not path.exists()
    locks.Lock(path).release()
    done = threading.Event()

    def test_all_the_time() -> None:
        while not done.is_set():
            locks.is_held(path)

    thread = threading.Thread(target=test_all_the_time)
    thread.start()
    try:
        for _ in range(200):
            locks.Lock(path).release()
    finally:
        done.set()
        thread.join()


def test_those_who_ask_for_a_lone_holder_do_not_take_each_other_for_one(tmp_path: Path) -> None:
    path = tmp_path / "shim.lock"
    assert not locks.is_held(path, alone=True)
    with locks.hold(path):
        assert locks.is_held(path, alone=True)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.extend(locks.is_held(path, alone=True) for _ in range(300))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 1200
    assert not any(answers)


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "shim.lock"
    lock = locks.Lock(path)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        lock.release()
        lock.release()
        assert not locks.is_held(path)
    finally:
        child.communicate()


def test_a_deleted_lock_file_is_not_mistaken_for_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "shim.lock"
    old = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        path.unlink()
        assert not locks._is_same_file(old, path)
        path.touch()
        assert not locks._is_same_file(old, path)
    finally:
        os.close(old)


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "shim.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"shim\.lock"):
        locks.Lock(tmp_path / "shim.lock")
    with pytest.raises(OSError, match=r"shim\.lock"):
        locks.is_held(tmp_path / "shim.lock")
