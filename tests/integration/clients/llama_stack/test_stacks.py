"""posttrain inside real llama-stack servers, with the configurations that are shipped: killed in mid-training, started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from posttrain_trainer.contract import proc

NEEDS = (
    "alembic", "fastapi", "httpx", "nvidia-ml-py", "platformdirs", "prometheus-client", "psutil", "pydantic-settings", "python-multipart",
    "pyyaml", "rich", "sqlalchemy>=2.0.30", "typer", "uvicorn", "aiosqlite",
)  # fmt: skip
"""What the service needs, installed beside the stack; there is no torch."""


def seen_together(version: str) -> tuple[str, str]:
    """Options for pip: the versions with which this was seen to work; to find others from nothing takes it minutes."""
    return "-c", str(Path(__file__).with_name(f"constraints-{version}.txt"))


@dataclass
class Stack:
    """A stack that can be started, killed and started again."""

    argv: list[str]
    variables: dict[str, str]
    url: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, until: Callable[..., Any]) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.argv, env=os.environ | self.variables, stdout=log, stderr=log)
        until(self.answers, timeout_s=120)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/v1/health").status_code == 200
        return False

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@pytest.fixture
def make_stack(tmp_path, repository, stand_in_settings) -> Iterator[Callable[..., Stack]]:
    """Makes a stack of a command line in which PORT stands for its port; its jobs are ended with the test."""
    settings = stand_in_settings(tmp_path)
    made: list[Stack] = []

    def make(*argv: str) -> Stack:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        variables = {
            "POSTTRAIN_STORAGE_DIR": str(settings.storage_dir), "POSTTRAIN_TRAINER_PYTHON": str(settings.trainer_python),
            "POSTTRAIN_DISK_RESERVE_BYTES": "0", "POSTTRAIN_SUPERVISE_INTERVAL_S": "0.2", "SQLITE_STORE_DIR": str(tmp_path / "stack"),
            "POSTTRAIN_STACK_APIS": str(repository / "deploy/llama-stack/apis"), "LLAMA_STACK_DISABLE_VERSION_CHECK": "1",
            "POSTTRAIN_STACK_PROVIDERS": str(repository / "deploy/llama-stack/providers"),
            "PYTHONPATH": f"{repository / 'service'}{os.pathsep}{repository / 'trainer'}",
        }  # fmt: skip
        made.append(Stack([part.replace("PORT", str(port)) for part in argv], variables, f"http://127.0.0.1:{port}", tmp_path / "log"))
        return made[-1]

    yield make
    for stack in made:
        if stack.process is not None and stack.process.poll() is None:
            stack.process.kill()
            stack.process.wait()
    for folder in settings.jobs_dir.iterdir() if settings.jobs_dir.is_dir() else ():
        assert proc.kill_marked(folder.name).left == ()


def through_a_kill(stack: Stack, client, version: str, storage: Path, until, *more: str) -> dict[str, str]:
    """Everything that a client does before and after the stack is killed while a job trains."""
    walk = str(Path(__file__).with_name("walk_stack.py"))
    stack.start(until)
    seen = json.loads(client.run(walk, stack.url, version, "before", *more).splitlines()[-1])
    assert stack.end(signal.SIGKILL) == -signal.SIGKILL
    [run] = (storage / "jobs").iterdir()
    assert not (run / "attempts/1/exit.json").exists(), "it was to be killed in mid-training"
    (run / "go").touch()
    stack.start(until)
    seen |= json.loads(client.run(walk, stack.url, version, "after", *more).splitlines()[-1])
    assert stack.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    assert not (storage / "posttrain.db-journal").exists()
    return seen


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time, packages are installed
def test_llama_stack_0_6_1_with_the_bridge_for_its_clients(make_stack, repository, environments, table, until, tmp_path):
    folder = repository / ".cache" / "clients"
    pins = ("llama-stack==0.6.1", "llama-stack-api==0.6.1", "llama-stack-client==0.6.1", "mcp<2")
    server = environments.virtual(folder / "llama-stack-0.6.1", environments.python312(), *seen_together("0.6.1"), *pins, *NEEDS)
    program = str(Path(server.python).with_name("llama"))
    stack = make_stack(program, "stack", "run", str(repository / "deploy/llama-stack/run-0.6.yaml"), "--port", "PORT")
    seen = through_a_kill(stack, server, "0.6.1", tmp_path / "storage", until)
    assert "torch" not in server.run("-m", "pip", "list", "--format=freeze")
    table.check(repository, "llama-stack", "0.6.1", seen)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time, packages are installed
def test_llama_stack_0_2_12(make_stack, repository, environments, table, until, tmp_path):
    pins = ("llama-stack==0.2.12", "llama-stack-client==0.2.12", "fire", "requests", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "mcp<2", "pandas")
    server = environments.virtual(repository / ".cache" / "clients" / "llama-stack-0.2.12", environments.this_python(), *seen_together("0.2.12"), *pins, *NEEDS)
    config = str(repository / "deploy/llama-stack/run-0.2.yaml")
    stack = make_stack(server.python, "-m", "llama_stack.distribution.server.server", "--config", config, "--port", "PORT")
    seen = through_a_kill(stack, server, "0.2.12", tmp_path / "storage", until)
    table.check(repository, "llama-stack", "0.2.12", seen)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time, packages are installed
def test_ogx_gets_post_training(make_stack, repository, environments, table, until, tmp_path):
    folder = repository / ".cache" / "clients" / "ogx-1.5.0"
    pins = ("ogx==1.5.0", "ogx-api==1.5.0", "llama-stack-client==0.7.0")
    server = environments.virtual(folder, environments.python312(), *seen_together("ogx-1.5.0"), *pins, *NEEDS)
    config = str(repository / "deploy/ogx/run.yaml")
    stack = make_stack(str(Path(server.python).with_name("ogx")), "run", config, "--port", "PORT", "--insecure")
    stack.variables["POSTTRAIN_STACK_APIS"] = str(repository / "deploy/ogx/apis")
    seen = through_a_kill(stack, server, "0.7.0", tmp_path / "storage", until, "ogx")
    assert "torch" not in server.run("-m", "pip", "list", "--format=freeze")
    table.check(repository, "ogx", "1.5.0", seen)
