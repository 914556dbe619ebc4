"""The real service under uvicorn, with a trainer that only stands in, and what the real `openai` client needs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from posttrain_service import compose
from posttrain_service.app import create_app
from posttrain_service.settings import Settings
from posttrain_trainer.contract import proc

openai = pytest.importorskip("openai", reason="the openai package is not installed")

LAUNCHER = """#!{python}
import runpy, sys
runpy.run_path({script!r}, run_name="__main__")
"""


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait for something that another process or thread does; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def row(todo: str = "train", answer: str = "b") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": todo}, {"role": "assistant", "content": answer}]}


def jsonl(*rows: Any) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in rows)


@dataclass
class Server:
    """A running server, and a client of it."""

    base_url: str
    settings: Settings
    runtime: compose.Runtime
    client: Any

    def upload(self, *rows: Any, name: str = "rows.jsonl", **options: Any) -> str:
        return self.client.files.create(file=(name, jsonl(*rows)), purpose="fine-tune", **options).id

    def create(self, todo: str = "train", **options: Any) -> Any:
        """A job whose rows say what the stand-in does."""
        return self.client.fine_tuning.jobs.create(model="tiny", training_file=self.upload(row(todo)), **options)

    def wait(self, job: Any, *states: str) -> Any:
        return until(lambda: (now := self.client.fine_tuning.jobs.retrieve(job.id)).status in states and now)

    def wait_for_step(self, job: Any, step: int) -> None:
        until(lambda: (self.runtime.services.jobs.get(job.id).progress or {}).get("step") == step)

    def go(self, job: Any) -> None:
        """Let a stand-in that waits go on."""
        run_id = self.runtime.services.jobs.get(job.id).job.run_id
        (self.settings.jobs_dir / run_id / "go").touch()


def _settings(folder: Path) -> Settings:
    python = folder / "python"
    script = str(Path(__file__).with_name("stand_in.py"))
    python.write_text(LAUNCHER.format(python=sys.executable, script=script))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    model = folder / "storage" / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    return Settings(
        storage_dir=folder / "storage", trainer_python=python, disk_reserve_bytes=0, stop_grace_s=5,
        supervise_interval_s=0.1, max_upload_bytes=200_000_000,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = _settings(tmp_path_factory.mktemp("openai"))
    built: list[compose.Runtime] = []

    def build(told: Settings) -> compose.Runtime:
        built.append(compose.build(told, slots=["cpu:0"]))
        return built[0]

    config = uvicorn.Config(create_app(settings, build=build), host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=5)
    web = uvicorn.Server(config)
    sock = config.bind_socket()
    sock.listen()
    thread = threading.Thread(target=web.run, kwargs={"sockets": [sock]})
    thread.start()
    until(lambda: built or not thread.is_alive())
    base_url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    client = openai.OpenAI(base_url=base_url, api_key="any")
    try:
        yield Server(base_url, settings, built[0], client)
    finally:
        client.close()
        web.should_exit = True
        thread.join()
        for folder in settings.jobs_dir.iterdir():
            assert proc.kill_marked(folder.name).left == ()


@pytest.fixture
def client(server: Server) -> Any:
    return server.client


@pytest.fixture
def jobs(server: Server) -> Iterator[Any]:
    """The client's jobs; whatever a test leaves unended is cancelled."""
    yield server.client.fine_tuning.jobs
    for job in server.client.fine_tuning.jobs.list(limit=100):
        if job.status not in ("succeeded", "failed", "cancelled"):
            with contextlib.suppress(openai.ConflictError):  # it ended in between
                server.client.fine_tuning.jobs.cancel(job.id)
            server.wait(job, "succeeded", "failed", "cancelled")


def _module(name: str) -> Any:
    """A module beside this file, which tests can't import by its name."""
    spec = importlib.util.spec_from_file_location(f"clients_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def environments() -> Any:
    """Makes environments with real packages."""
    return _module("environments")


@pytest.fixture(scope="session")
def table() -> Any:
    """The table of what was seen."""
    return _module("table")


@pytest.fixture(scope="session")
def stand_in_settings() -> Callable[[Path], Settings]:
    """Makes settings with a tiny model and a trainer that only stands in, below a folder."""
    return _settings


@pytest.fixture(name="until", scope="session")
def _until() -> Callable[..., Any]:
    """Waits for something that another process or thread does."""
    return until


@pytest.fixture(name="row")
def _row() -> Callable[..., dict[str, Any]]:
    """Makes a chat row."""
    return row


@pytest.fixture(name="jsonl")
def _jsonl() -> Callable[..., bytes]:
    """Makes JSON lines of rows."""
    return jsonl
