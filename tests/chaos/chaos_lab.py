"""A real `posttrain serve` over a storage folder, with the stand-in trainer: what the rounds strike at and look at."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import posttrain_trainer
from posttrain_service.client import ApiError, Client, ServerGone
from posttrain_trainer.contract import proc
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, read_json

STAND_IN = Path(__file__).with_name("chaos_stand_in.py")
HEARTBEAT_S = 2.0
IMPORT_S = 12.0
"""On a busy machine an interpreter needs seconds to start."""
GRACE_S = 3.0
SETTLED = ("succeeded", "failed", "cancelled", "paused")
Target = str


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Wait for something that another process does; its value.

    Raises:
        TimeoutError: It didn't come.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.01)
    return value


class Server:
    """One server process; started again after every death."""

    def __init__(self, storage: Path, python: Path, **settings: object) -> None:
        self.storage = storage
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("POSTTRAIN_")}
        told = {
            "storage_dir": storage, "trainer_python": python, "disk_reserve_bytes": 0, "cpu_slots": 2, "stop_grace_s": GRACE_S,
            "launch_timeout_s": 30, "supervise_interval_s": 0.3, "port": 0,
        }  # fmt: skip
        told |= {f"heartbeat_{p}_s": HEARTBEAT_S for p in ("load", "data", "compile", "train", "validate", "save")}
        told["heartbeat_import_s"] = IMPORT_S
        self.env |= {f"POSTTRAIN_{name.upper()}": str(value) for name, value in (told | settings).items()}
        self.process: subprocess.Popen[str] | None = None
        self.client: Client | None = None
        self.address = ""
        self.lines: list[str] = []
        self._up = threading.Event()

    def start(self) -> None:
        """Start, and wait until it answers."""
        if self.client is not None:
            self.client.close()
        self._up = threading.Event()
        argv = [sys.executable, "-m", "posttrain_service", "serve"]
        # A session of its own: a job must survive whatever happens to its server's.
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=self.env, start_new_session=True)
        threading.Thread(target=self._read, args=(self.process, self._up), daemon=True).start()
        if not self._up.wait(120) or self.client is None:
            raise TimeoutError("the server did not come up: " + "".join(self.lines[-20:]))

    def _read(self, process: subprocess.Popen[str], up: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self.lines.append(line)
                if "posttrain serves at " in line:
                    self.address = line.split("posttrain serves at ")[1].split(";")[0]
                    self.client = Client(self.address)
                    up.set()
        up.set()

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def revive(self) -> None:
        """Wait for the death of the process that was told to end, and start another."""
        assert self.process is not None
        self.process.wait(30)
        self.start()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        if self.client is not None:
            self.client.close()

    def ask(self, call: Callable[[Client], Any], timeout_s: float = 60.0) -> Any:
        """The answer of a server that may just be gone; asked again until it is there."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                assert self.client is not None
                return call(self.client)
            except ServerGone:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


class Lab:
    """A storage folder, its server, and everything ever accepted by it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        python = folder / "python"
        trainer = Path(posttrain_trainer.__file__).parents[1]
        python.write_text(f'#!/bin/sh\nPYTHONPATH={trainer} exec {sys.executable} {STAND_IN} "$@"\n')
        python.chmod(0o755)
        self.storage = folder / "storage"
        model = self.storage / "models" / "tiny"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
        self.server = Server(self.storage, python, **settings)
        self.accepted: list[str] = []

    def submit(self, todo: str, **more: Any) -> str:
        rows = [{"messages": [{"role": "user", "content": todo}, {"role": "assistant", "content": "b"}]}]
        request = {"model": "tiny", "dataset": {"rows": rows}} | more
        job = str(self.server.ask(lambda client: client.create_job(request))["job_uuid"])
        self.accepted.append(job)
        return job

    def job(self, job: str) -> dict[str, Any]:
        return dict(self.server.ask(lambda client: client.job(job)))

    def verb(self, job: str, verb: str) -> None:
        """Cancel or pause, unless the job has ended before."""
        try:
            self.server.ask(lambda client: getattr(client, verb)(job))
        except ApiError as error:
            if error.status != 409:
                raise

    def run_dir(self, job: str) -> RunDir:
        return RunDir(self.storage / "jobs" / job)

    def attempt(self, job: str) -> AttemptDir | None:
        attempts = self.run_dir(job).attempts()
        return attempts[-1] if attempts else None

    def go(self, job: str) -> None:
        (self.run_dir(job).path / "go").touch()

    def alive(self, job: str) -> list[proc.Identity]:
        return proc.find(job)

    def phase_of(self, job: str) -> tuple[str | None, int]:
        """Phase and step by the heartbeat of the newest attempt."""
        attempt = self.attempt(job)
        beat = (read_json(attempt.heartbeat) if attempt else None) or {}
        return beat.get("phase"), int(beat.get("step", 0))

    def process(self, job: str, target: Target) -> proc.Identity | None:
        """The shim, torchrun, or a rank ("rank-0") of the newest attempt, if it lives."""
        if target.startswith("rank-"):
            return next((i for i in self.alive(job) if _rank_of(i.pid) == target.removeprefix("rank-")), None)
        attempt = self.attempt(job)
        record = (read_json(attempt.run) if attempt else None) or {}
        identity = proc.Identity.from_json(record.get(target))
        return identity if identity is not None and proc.is_alive(identity) else None

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.storage / 'posttrain.db'}?mode=ro", uri=True, timeout=30) as connection:
            rows = connection.execute(sql).fetchall()
        connection.close()
        return rows

    def story(self, job: str) -> str:
        """Everything that tells what became of a job, for whoever has to find out why."""
        lines = [str(self.job(job)["status"])]
        for event in self.server.ask(lambda client: list(client.events(job))):
            lines.append(f"{event['created_at']} {event['type']}: {event['message']} {event['data']}")
        for attempt in self.run_dir(job).attempts():
            lines += [f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(attempt.path.glob("*.json"))]
            lines.append(attempt.torchrun_log.read_text(errors="replace")[-1500:])
        return "\n".join([*lines, "".join(line for line in self.server.lines[-400:] if " api.access: " not in line)])

    def close(self) -> None:
        """End everything that belongs to this lab."""
        if self.server.process is not None:
            self.server.send(signal.SIGCONT)
        self.server.stop()
        for folder in (self.storage / "jobs").glob("*"):
            proc.kill_marked(folder.name)


def _rank_of(pid: int) -> str | None:
    try:
        return psutil.Process(pid).environ().get("RANK")
    except psutil.Error:
        return None


def broken_checkpoints(lab: Lab, job: str) -> list[str]:
    """What is wrong with the checkpoints that the server lists."""
    faults = []
    listed = lab.server.ask(lambda client: list(client.checkpoints(job)))
    for checkpoint in listed:
        folder = lab.run_dir(job).checkpoint(checkpoint["id"])
        for file in checkpoint["files"]:
            data = (folder / file["path"]).read_bytes()
            if hashlib.sha256(data).hexdigest() != file["sha256"]:
                faults.append(f"{checkpoint['id']}/{file['path']} is not what its manifest says")
    return faults
