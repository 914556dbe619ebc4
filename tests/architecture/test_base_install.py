"""Without torch and its company the service imports and serves: shown by a real process that cannot import them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest

HEAVY = ("torch", "transformers", "peft", "accelerate", "numpy", "safetensors", "pyarrow", "tokenizers")
RESIDENT_BYTES = 150_000_000

BLOCKER = textwrap.dedent(
    f"""
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {HEAVY!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
            return None

    sys.meta_path.insert(0, Blocker())
    """
)


def test_every_module_of_the_service_imports_without_torch() -> None:
    script = BLOCKER + textwrap.dedent(
        """
        import importlib, json, pkgutil, posttrain_service, posttrain_trainer.contract as contract
        names = [m.name for p in (posttrain_service, contract) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
        # Only a stack that is installed loads these: they are made of its types, and tested inside it.
        inside = {f"posttrain_service.adapters.llama_stack.{part}" for part in ("bridge", "by_keyword", "by_request")}
        assert inside <= set(names)
        for name in names:
            if not name.endswith("__main__") and "._migrations" not in name and name not in inside:
                importlib.import_module(name)
        print(json.dumps(len(names)))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) > 50


def test_the_trainers_public_names_need_no_torch() -> None:
    script = BLOCKER + "from posttrain_trainer import FullTrainingArguments, TorchrunArguments, train_torchrun"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> httpx.Response:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return httpx.get(url, timeout=10, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"no answer from {url}: {log.read_text()[-3000:]}")


def test_the_service_serves_without_torch_in_little_memory(tmp_path: Path) -> None:
    port = free_port()
    arguments = ["posttrain", "serve", "--port", str(port), "--storage-dir", str(tmp_path / "storage")]
    script = BLOCKER + f"from posttrain_service.cli.main import main\nsys.argv = {arguments!r}\nmain()\n"
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=out, stderr=subprocess.STDOUT, env=os.environ.copy())
    try:
        address = f"http://127.0.0.1:{port}"
        live = wait_until_it_answers(process, f"{address}/health/live", log)
        assert (live.status_code, live.json()["status"]) == (200, "ok")
        jobs = httpx.get(f"{address}/post_training/jobs", timeout=30, trust_env=False)
        assert jobs.json()["data"] == []
        assert httpx.get(f"{address}/openapi.json", timeout=30, trust_env=False).status_code == 200
        resident = psutil.Process(process.pid).memory_info().rss
        assert resident < RESIDENT_BYTES, f"{resident / 1e6:.0f} MB"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
