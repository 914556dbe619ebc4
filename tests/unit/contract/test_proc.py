from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from posttrain_trainer.contract import proc
from posttrain_trainer.contract.rundir import ENV_ATTEMPT, ENV_RUN_ID

SLEEPER = "import signal, sys; [signal.signal(s, signal.SIG_IGN) for s in (15, 2, 1)]; print('up', flush=True); signal.pause()"
DAEMON = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", {SLEEPER!r}])
    os._exit(0)
os.wait()
"""


@lru_cache(maxsize=1)
def psutil_table() -> proc._PsutilTable:
    table = proc._PsutilTable()
    table.boot = lambda: ("boot", "")  # type: ignore[method-assign]
    return table


@pytest.fixture(params=["linux", "psutil"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both process tables, so that the one for platforms without /proc is tested here too."""
    if request.param == "psutil":
        monkeypatch.setattr(proc, "_table", psutil_table)
    elif sys.platform != "linux":
        pytest.skip("no /proc on this platform")


class Job:
    """Processes with one marker; each says "up" when it is ready."""

    def __init__(self) -> None:
        self.run_id = str(uuid.uuid4())
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, code: str = SLEEPER, attempt: int = 1, *, new_session: bool = True) -> subprocess.Popen[str]:
        env = {**os.environ, ENV_RUN_ID: self.run_id, ENV_ATTEMPT: str(attempt)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, start_new_session=new_session
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    proc.kill_marked(job.run_id)
    for process in job.processes:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("platform")
def test_identity_tells_a_recycled_number_from_the_process(job: Job) -> None:
    process = job.start()
    identity = proc.identify(process.pid)
    assert identity is not None
    assert proc.is_alive(identity)
    assert proc.Identity.from_json(identity.to_json()) == identity
    for stranger in (
        replace(identity, start=identity.start + 1),
        replace(identity, boot_id="another boot"),
        replace(identity, pid_namespace="another namespace"),
    ):
        assert not proc.is_alive(stranger)
        assert not proc.send(stranger, signal.SIGKILL)
    assert process.poll() is None
    assert proc.send(identity, signal.SIGKILL)
    # Dead but not yet waited for: a zombie counts as gone.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not proc.is_alive(identity)
    assert proc.identify(process.pid) is None
    process.wait()
    assert not proc.send(identity, signal.SIGKILL)


@pytest.mark.parametrize("data", [None, 1, {}, {"pid": "7", "start": 1}, {"pid": 7}, {"pid": True, "start": 1}])
def test_a_record_without_an_identity_gives_none(data: object) -> None:
    assert proc.Identity.from_json(data) is None


@pytest.mark.usefixtures("platform")
def test_find_by_run_and_attempt(job: Job) -> None:
    first, second = job.start(attempt=1), job.start(attempt=2)
    assert {p.pid for p in proc.find(job.run_id)} == {first.pid, second.pid}
    assert [p.pid for p in proc.find(job.run_id, 2)] == [second.pid]
    assert proc.find(job.run_id[:-1]) == []
    identity = proc.identify(first.pid)
    assert identity is not None
    assert proc.carries(identity, job.run_id, 1)
    assert not proc.carries(identity, job.run_id, 2)


@pytest.mark.usefixtures("platform")
def test_a_daemon_that_ignores_signals_is_killed(job: Job) -> None:
    job.start(DAEMON)
    bystander = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, start_new_session=True)
    try:
        [daemon] = proc.find(job.run_id)
        assert proc.send(daemon, signal.SIGTERM)
        assert proc.kill_marked(job.run_id) == proc.Killed(1, ())
        assert not proc.is_alive(daemon)
        assert bystander.poll() is None
        assert proc.kill_marked(job.run_id) == proc.Killed(0, ())
    finally:
        bystander.kill()
        bystander.communicate()


def test_children_born_during_the_kill_die_too(job: Job) -> None:
    job.start("import subprocess, sys, threading\nprint('up', flush=True)\nwhile True: subprocess.Popen(['sleep', '60'])")
    killed = proc.kill_marked(job.run_id)
    assert killed.left == ()
    assert killed.num_killed >= 1
    assert proc.find(job.run_id) == []


@pytest.mark.usefixtures("platform")
def test_descendants_are_followed_through_sessions(job: Job) -> None:
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SLEEPER!r}], env={{}}, start_new_session=True).wait()"
    parent = job.start(code)
    assert [p.pid for p in proc.find(job.run_id)] == [parent.pid]
    found = proc.descendants(parent.pid)
    assert len(found) == 1
    assert proc.kill_all(lambda: [p for p in found if proc.is_alive(p)]).left == ()
    parent.wait(10)


@pytest.mark.usefixtures("platform")
def test_own_session_ancestors_and_low_pids_are_never_signalled(job: Job) -> None:
    housemate = job.start(new_session=False)
    assert proc.find(job.run_id) == []
    me, parent = proc.own(), proc.identify(os.getppid())
    identities = [me, proc.identify(housemate.pid), parent, *(replace(me, pid=pid) for pid in (1, 0, -1, -me.pid))]
    for identity in identities:
        if identity is not None:
            assert not proc.send(identity, signal.SIGKILL)
    assert housemate.poll() is None


def test_without_pidfd_the_identity_is_checked_before_the_signal(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    process = job.start()
    identity = proc.identify(process.pid)
    assert identity is not None
    assert not proc.send(replace(identity, start=1), signal.SIGKILL)
    assert process.poll() is None
    assert proc.send(identity, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


def test_what_does_not_die_is_reported_when_the_time_is_over() -> None:
    immortal = replace(proc.own(), start=1)
    waits: list[float] = []
    killed = proc.kill_all(lambda: [immortal], timeout_s=0.0, pause=waits.append)
    assert killed == proc.Killed(0, (immortal,))


def test_two_looks_in_a_row_must_find_nothing() -> None:
    ghost = replace(proc.own(), start=1)
    looks = iter([[ghost], [], [ghost], [], []])
    assert proc.kill_all(lambda: next(looks), pause=lambda _: None) == proc.Killed(1, ())
    assert list(looks) == []


def test_a_name_with_brackets_and_spaces_is_parsed(job: Job, tmp_path: Path) -> None:
    program = tmp_path / "a) R (1 2"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"], start_new_session=True)
    try:
        # The child is its own program only after exec, which closes the descriptors that Popen waits for.
        identity = proc.identify(process.pid)
        assert identity is not None
        assert identity.start >= proc.own().start
        assert [p.pid for p in proc.descendants(os.getpid()) if p.pid == process.pid] == [process.pid]
    finally:
        process.kill()
        process.wait()


def test_both_modules_load_in_an_isolated_interpreter_with_the_standard_library_alone() -> None:
    root = Path(proc.__file__).parents[2]
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from posttrain_trainer.contract import locks, proc, rundir\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('pydantic', 'torch', 'psutil', 'subprocess')]\n"
        "print(bad, proc.own().pid > 1)"
    )
    out = subprocess.run([sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, check=True)
    assert out.stdout == "[] True\n"

