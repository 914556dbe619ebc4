"""A service whose jobs are written by hand, and a real Chromium that looks at its dashboard."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from posttrain_service.app import create_app
from posttrain_service.clock import SystemClock
from posttrain_service.compose import Runtime, build
from posttrain_service.domain.job import Job
from posttrain_service.settings import Settings
from posttrain_trainer.contract.rundir import RunDir, write_json

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"messages": [{"role": "user", "content": "Which star is that?"}, {"role": "assistant", "content": "Vega."}]}] * 48
ESTIMATE = {
    "memory": {"per_rank_bytes": 2_900_000_000, "total_bytes": 2_900_000_000, "fits": True}, "parameters": 139_399_488,
    "trainable": 4_884_480, "steps": 300, "tokens": 1_430_000,
    "packing": {"max_batch_len": 4096, "micro_batches": 350, "efficiency": 0.9975, "padded_efficiency": 0.583},
}  # fmt: skip
INSPECTED = {"rows": 48, "tokens": 912, "supervised_tokens": 144, "max_len": 19, "dropped": {}}
LINE = "\x1b[2m14:02:11\x1b[0m \x1b[32mINFO\x1b[0m step {step} \x1b[1mloss {loss:.4f}\x1b[0m 512 tokens/s\n"
TRAINER = """#!/bin/sh
for last; do :; done
case $last in
  estimate) echo '{estimate}' ;;
  inspect) echo '{inspected}' ;;
  *) echo '{{"version": "0.1.0", "contract": 1, "packages": {{"torch": "2.13.0"}}}}' ;;
esac
"""


class Shifted(SystemClock):
    """The real time, less some."""

    behind_s = 0.0

    def now(self) -> float:
        return super().now() - self.behind_s


def _bench() -> ModuleType:
    """The stand-in for launches that the use cases are tested with."""
    spec = importlib.util.spec_from_file_location("work_bench", ROOT / "tests/unit/service/work/conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


class World:
    """One service without loops of its own, under uvicorn, and what its jobs' folders hold."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        trainer = folder / "trainer"
        trainer.write_text(TRAINER.format(estimate=json.dumps(ESTIMATE), inspected=json.dumps(INSPECTED)))
        trainer.chmod(0o755)
        model = folder / "storage/models/SmolLM2-135M-Instruct"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
        (model / "model.safetensors").write_bytes(b"x" * 100)
        self.settings = Settings(storage_dir=folder / "storage", trainer_python=trainer, disk_reserve_bytes=0, **changes)
        bench = _bench()
        self.clock = Shifted()
        self.backend = bench.FakeBackend()
        self.runtime: Runtime = build(self.settings, backend=self.backend, clock=self.clock, slots=("cpu:0", "cpu:1"))
        self.done = self.live = self.waiting = self.broken = None
        self.bench = bench.Bench(self.runtime, self.backend, SimpleNamespace(advance=lambda seconds: None))
        config = uvicorn.Config(
            create_app(self.settings, build=lambda told: bench.Standing(self.runtime.services)),
            host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        sock = config.bind_socket()
        sock.listen()
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]})
        self._thread.start()
        self.address = f"http://127.0.0.1:{sock.getsockname()[1]}{self.settings.root_path}"
        self.http = httpx.Client(base_url=self.address)

    def close(self) -> None:
        self.http.close()
        self.runtime.services.streams.close()
        self._server.should_exit = True
        self._thread.join()
        self.runtime.stop()

    def submit(self, name: str, **changes: Any) -> Job:
        body = {"model": "SmolLM2-135M-Instruct", "name": name, "dataset": {"rows": ROWS}} | changes
        answer = self.http.post("/post_training/jobs", json=body)
        assert answer.status_code == 201, answer.text
        return self.job(answer.json()["job_uuid"])

    def job(self, job_uuid: str) -> Job:
        return self.runtime.services.jobs.get(job_uuid).job

    def run_dir(self, job: Job) -> RunDir:
        return RunDir(self.settings.jobs_dir / job.run_id)

    def start(self, job: Job) -> Job:
        self.bench.rounds(2)
        job = self.job(job.job_uuid)
        assert job.state == "running"
        self.run_dir(job).attempt(1).logs.mkdir(parents=True, exist_ok=True)
        return job

    def ends(self, job: Job, code: int = 0, **facts: Any) -> Job:
        self.bench.ends(job, code, **facts)
        self.bench.rounds()
        return self.job(job.job_uuid)

    def train(self, job: Job, first: int, last: int, total: int, *, seed: int = 0, rate: float = 2e-4, loss: float = 3.1, step_s: float = 9.0) -> None:
        """Write the points of these steps, and the heartbeat after them."""
        attempt, noise = self.run_dir(job).attempt(1), random.Random(seed * 100_000 + first)
        begun = time.time() - (last - first + 1) * step_s
        with attempt.metrics.open("a") as file:
            for step in range(first, last + 1):
                share, mean = step / total, loss * (0.32 + 0.68 * math.exp(-4 * step / total))
                point = {
                    "v": 1, "attempt": 1, "step": step, "epoch": 3 * share, "time": begun + (step - first) * step_s, "loss": mean * noise.gauss(1, 0.045),
                    "learning_rate": rate * min(1, step / 10) * 0.5 * (1 + math.cos(math.pi * share)), "grad_norm": 1.1 + abs(noise.gauss(0, 0.25)) + 2 / step,
                    "tokens": 4700, "tokens_per_s": 512 + noise.gauss(0, 14), "step_time_s": step_s + noise.gauss(0, 0.2), "forward_time_s": step_s * 0.36,
                    "backward_time_s": step_s * 0.6, "memory_bytes": 2_410_000_000 + 40_000_000 * min(step, 20), "accuracy": min(0.92, 0.45 + 0.4 * share) + noise.gauss(0, 0.01),
                }  # fmt: skip
                file.write(json.dumps(point) + "\n")
                if step % 20 == 0:
                    file.write(json.dumps({k: point[k] for k in ("v", "attempt", "step", "epoch", "time")} | {"validation_loss": mean * 1.06, "validation_accuracy": 0.43 + 0.35 * share}) + "\n")
        beat = {
            "v": 1, "time": time.time(), "phase": "train", "step": last, "total_steps": total, "epoch": 3 * last / total, "samples_seen": 32 * last,
            "tokens_seen": 4700 * last, "tokens_per_s": 512.3, "eta_s": (total - last) * step_s,
        }  # fmt: skip
        write_json(attempt.heartbeat, beat, durable=False)

    def beat(self, job: Job) -> dict[str, Any]:
        """The heartbeat that `train` wrote."""
        return json.loads(self.run_dir(job).attempt(1).heartbeat.read_text())

    def log(self, job: Job, data: bytes) -> None:
        with self.run_dir(job).attempt(1).rank_log(0).open("ab") as file:
            file.write(data)

    def checkpoint(self, job: Job, step: int, *, best: bool = False) -> None:
        folder = self.run_dir(job).checkpoint(f"step-{step:06d}")
        (folder / "model").mkdir(parents=True)
        files = []
        for name, data in (("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"w" * 250_000)):
            (folder / "model" / name).write_bytes(data)
            files.append({"path": f"model/{name}", "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        write_json(folder / "manifest.json", {
            "v": 1, "id": folder.name, "step": step, "epoch": step / 100, "samples_seen": 32 * step, "tokens_seen": 4700 * step, "attempt": 1, "created_at": time.time(),
            "kind": "adapter", "trigger": "epoch", "metrics": {"loss": 1.9 - step / 400, "validation_loss": 2.0 - step / 400}, "arguments_digest": "x", "files": files,
        })  # fmt: skip


def chromium() -> str | None:
    """A Chromium of this machine: the one that is named, the system's, or None for Playwright's own."""
    named = os.environ.get("POSTTRAIN_TEST_CHROMIUM")
    return named or next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium; ended with the file: its event loop runs in this thread, where other tests could start none."""
    api = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    with api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"] if os.geteuid() == 0 else [])
        except api.Error as error:
            pytest.skip(f"there is no Chromium (apt-get install chromium, or playwright install chromium): {str(error)[:200]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**changes: Any) -> World:
        made.append(World(tmp_path_factory.mktemp("dashboard"), **changes))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(scope="module")
def world(make_world: Callable[..., World]) -> World:
    """A service with jobs in all kinds of states: `done`, `live`, `waiting` and `broken`."""
    made = make_world()
    made.clock.behind_s = 7900
    done = made.start(made.submit("stars-lora16", metadata={"team": "sky"}, validation_split=0.1, adapter={"kind": "lora", "rank": 16}))
    made.train(done, 1, 300, 300, seed=1)
    for step in (100, 200, 300):
        made.checkpoint(done, step)
    made.clock.behind_s = 5100
    made.done = made.ends(done, result={"status": "completed", "steps": 300, "total_steps": 300}, heartbeat=made.beat(done))
    broken = made.start(made.submit("too-long-rows"))
    made.train(broken, 1, 12, 300, seed=3, loss=3.4)
    made.clock.behind_s = 4900
    error = {"code": "out_of_memory", "message": "no memory left for the logits of 8,192 tokens", "rank": 0, "log_tail": "step 12 loss 3.28\nRuntimeError: out of memory"}
    made.broken = made.ends(broken, 1, error=error, heartbeat=made.beat(broken))
    made.clock.behind_s = 1300
    knobs = {"training": {"learning_rate": 4e-4, "num_epochs": 3}, "validation_split": 0.1, "adapter": {"kind": "lora", "rank": 64}}
    made.live = made.start(made.submit("stars-lora64", metadata={"team": "sky"}, **knobs))
    made.train(made.live, 1, 140, 300, seed=2, rate=4e-4, loss=2.9)
    made.log(made.live, "".join(LINE.format(step=step, loss=2.9 - step / 90) for step in range(1, 141)).encode())
    made.log(made.live, b"\rvalidating  33%|###   | 2/6\rvalidating 100%|######| 6/6\n\x1b[33mWARNING\x1b[0m 2 rows were longer than max_seq_len and left out\n")
    made.bench.sees(made.live, heartbeat=made.beat(made.live))
    made.clock.behind_s = 240
    made.waiting = made.submit("all-weights", resources={"devices": 2, "priority": 5})
    made.bench.rounds(1)
    made.clock.behind_s = 0
    return made


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of its own, which fails its test on an error in the console and on a request to any other server."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, reduced_motion="reduce", accept_downloads=True)
    made = context.new_page()
    made.set_default_timeout(10_000)
    faults: list[str] = []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource") else None)
    made.on("request", lambda request: None if request.url.startswith(("http://127.0.0.1:", "data:", "blob:")) else faults.append(f"asked for {request.url}"))
    yield made
    context.close()
    assert faults == []


@pytest.fixture
def until(page: Any) -> Callable[..., Any]:
    """Waits for what a script says of the page. Playwright's own waiting makes programs of text, which the page's policy forbids."""

    def wait(script: str, argument: Any = None, timeout_s: float = 15) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := page.evaluate(script, argument)):
            assert time.monotonic() < deadline, f"in vain: {script}"
            page.wait_for_timeout(30)
        return value

    return wait
