"""Where cgroup v2 can be had, nothing escapes: neither by a cleared environment nor by outliving the shim."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.launch.backend import Liveness
from posttrain_trainer.contract import cgroup, proc
from posttrain_trainer.contract.rundir import read_json, write_json

# Two forks, a session of its own and no environment: neither the marker nor the chain of parents leads to it.
ESCAPES = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-c",
            "import os, signal; signal.signal(15, 1); print('escaped', os.getpid(), flush=True)\\nwhile True: signal.pause()"], {})
    os._exit(0)
os.wait()
signal.pause()
"""


@pytest.fixture(autouse=True)
def hierarchy(tmp_path: Path) -> Iterator[Path]:
    """The host's cgroup v2 hierarchy, mounted for the test if it isn't anywhere."""
    if not sys.platform.startswith("linux"):
        pytest.skip("control groups are Linux's")
    mounted = None
    if cgroup.own_group() is None:
        mounted = tmp_path / "cgroup"
        mounted.mkdir()
        try:
            done = subprocess.run(["mount", "-t", "cgroup2", "none", mounted], capture_output=True, text=True, timeout=20)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"no cgroup v2 here: {done.stderr.strip()}")
    try:
        probe = cgroup.make("probe", os.getpid())
        if probe is None:
            pytest.skip("cgroup v2 is there, but nothing of it is delegated to this user")
        assert cgroup.kill(probe, "probe", os.getpid())
        own = cgroup.own_group()
        assert own is not None
        yield own
    finally:
        if mounted is not None:
            subprocess.run(["umount", mounted], check=True, timeout=20)


def escaped(run: Any) -> proc.Identity:
    run.saw("escaped")
    run.until(lambda: run.attempt().torchrun_log.read_text().endswith("\n"))
    words = run.attempt().torchrun_log.read_text().split()
    identity = proc.identify(int(words[words.index("escaped") + 1]))
    assert identity is not None
    return identity


def group_of(run: Any) -> Path:
    return Path(read_json(run.attempt().run)["cgroup"])


def test_a_run_has_its_group_and_leaves_none(run: Any, hierarchy: Path) -> None:
    run.start(ESCAPES)
    stray = escaped(run)
    group = group_of(run)
    assert group.parent == hierarchy
    assert {stray.pid, run.launcher().pid} <= set(cgroup.pids(group))
    assert run.shim().pid not in cgroup.pids(group)
    run.backend.stop(run.run_dir, 1, "cancel", grace_s=1)
    assert run.exit()["unkillable"] == 0
    assert not proc.is_alive(stray)
    assert not group.exists()


def test_what_a_killed_shim_leaves_is_swept_though_it_hides(run: Any) -> None:
    run.start(ESCAPES)
    stray = escaped(run)
    assert proc.send(run.shim(), signal.SIGKILL)
    run.until(lambda: run.look().liveness is Liveness.DEAD)
    assert stray not in run.alive()
    run.backend.sweep(run.run_dir, 1)
    run.until(lambda: not proc.is_alive(stray))
    assert not group_of(run).exists()


@pytest.mark.parametrize("forgery", ["another name", "outside", "climbing", "own"])
def test_a_forged_record_gets_no_other_group_killed(run: Any, hierarchy: Path, tmp_path: Path, forgery: str) -> None:
    run.start(ESCAPES)
    stray = escaped(run)
    record = read_json(run.attempt().run)
    name = Path(record["cgroup"]).name
    outside = tmp_path / name
    outside.mkdir()
    (outside / "cgroup.kill").touch()
    innocent = cgroup.make("innocent", 1)
    assert innocent is not None
    record["cgroup"] = str({"another name": innocent, "outside": outside, "climbing": hierarchy / "x" / ".." / name, "own": hierarchy}[forgery])
    assert proc.send(run.shim(), signal.SIGKILL)
    run.until(lambda: run.look().liveness is Liveness.DEAD)
    write_json(run.attempt().run, record)
    try:
        run.backend.sweep(run.run_dir, 1)
        assert proc.is_alive(stray)
        assert (innocent.exists(), (outside / "cgroup.kill").read_text()) == (True, "")
    finally:
        assert cgroup.kill(innocent, "innocent", 1)
        assert cgroup.kill(hierarchy / name, run.run_id, 1)
    run.until(lambda: not proc.is_alive(stray))
