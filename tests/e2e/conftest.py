"""A real service as a process, on a folder of its own, and everything that it started ended afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.client import Client
from posttrain_trainer.contract import proc

DEADLINE_S = 240.0


def until(check: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """What `check` returns as soon as it is true; other processes work meanwhile, so there is no clock to be passed."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if found := check():
            return found
        time.sleep(0.1)
    pytest.fail(f"after {deadline_s:.0f} s still not: {what}")


class Served:
    """One storage folder and the service process on it, which may be killed and started again."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = storage / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "posttrain_service", "serve", "--port", str(self.port)]
        argv += ["--storage-dir", str(self.storage)]
        # Two cores for the one rank that trains; the caps of the test process are not meant for it.
        caps = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {key: value for key, value in os.environ.items() if key not in caps}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment)
        with Client(self.address) as client:
            until(lambda: self._alive() and client.is_ready(), "the service is ready", 60)

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def _alive(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return True


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A running service; afterwards it and its jobs are ended."""
    storage = tmp_path / "storage"
    storage.mkdir()
    service = Served(storage)
    service.start()
    yield service
    end(service.storage, service.process)


def end(storage: Path, server: subprocess.Popen[bytes] | None) -> None:
    """Stop the server and whatever its jobs left, by their markers."""
    if server is not None and server.poll() is None:
        server.terminate()
        server.wait(timeout=30)
    jobs = storage / "jobs"
    for run in jobs.iterdir() if jobs.is_dir() else ():
        proc.kill_marked(run.name)


@pytest.fixture
def place_model(smollm2: Path) -> Callable[[Path], str]:
    """Puts SmolLM2 below a models folder without copying its weights; returns its name."""

    def place(models: Path) -> str:
        target = models / smollm2.name
        shutil.copytree(smollm2, target, copy_function=_link)
        return target.name

    return place


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
