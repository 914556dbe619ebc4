"""`uvicorn --workers 2` on the factory: both processes answer, one acts, and both end when they are told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from posttrain_service.work.leader import LEADER_LOCK
from posttrain_trainer.contract.locks import is_held


@pytest.mark.slow
def test_two_workers_serve_one_storage(tmp_path: Path) -> None:
    environ = os.environ | {"POSTTRAIN_STORAGE_DIR": str(tmp_path / "storage"), "POSTTRAIN_DISK_RESERVE_BYTES": "0"}
    command = ["--factory", "posttrain_service.app:create_app", "--workers", "2", "--host", "127.0.0.1", "--port", "0"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        parent = subprocess.Popen([sys.executable, "-m", "uvicorn", *command], env=environ, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 90
        while log.read_text().count("Application startup complete") < 2:
            assert parent.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        port = log.read_text().split("http://127.0.0.1:")[1].split()[0]
        answers = [httpx.get(f"http://127.0.0.1:{port}/post_training/jobs", timeout=30) for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 6, answers[0].text
        assert is_held(tmp_path / "storage" / LEADER_LOCK)
        assert "Traceback" not in log.read_text()
        workers = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(30) in (0, -signal.SIGTERM)
        assert psutil.wait_procs(workers, timeout=10)[1] == []
        assert not is_held(tmp_path / "storage" / LEADER_LOCK)
    finally:
        for process in [*psutil.Process(parent.pid).children(recursive=True), parent] if parent.poll() is None else []:
            process.kill()
        parent.wait(10)
