"""What supervision and a full database cost: latencies, requests/s beside a bare FastAPI, CPU of the loops, restart, logs, followers.

    python benchmarks/service_load.py [--jobs 100000] [--requests 300] [--only NAME ...]

Everything is measured over HTTP on this machine, against a service of its own on a temporary storage directory whose jobs
run a stand-in without torch (`idle_trainer.py`), so that the trainer is not what is measured. "A core" is one core's time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from posttrain_service.client import Client
from posttrain_trainer.contract import proc

HELLO = """
import sys, uvicorn
from fastapi import FastAPI
app = FastAPI()
@app.get("/hello")
async def hello() -> dict[str, str]:
    return {"hello": "world"}
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
"""


class Connection:
    """One kept connection that asks for one thing after another; a client library would be slower than the server."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of the answer, which must be a success."""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            self._receive()
        lines = self._rest[:end].lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
        while len(self._rest) < end + 4 + length:
            self._receive()
        answer, self._rest = self._rest[end + 4 : end + 4 + length], self._rest[end + 4 + length :]
        if lines[0].split()[1][:1] != b"2":
            raise SystemExit(f"{method} {path}: {lines[0].decode()}: {answer[:500].decode()}")
        return answer

    def _receive(self) -> None:
        piece = self._socket.recv(1 << 16)
        if not piece:
            raise SystemExit("the server closed the connection")
        self._rest += piece


class Service:
    """A service process on a storage folder."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        model = self.storage / "models" / "tiny"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
        python = folder / "python"
        path = os.pathsep.join(sys.path[1:])
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "{Path(__file__).with_name("idle_trainer.py")}" "$@"\n')
        python.chmod(0o755)
        self.env = os.environ | {"POSTTRAIN_STORAGE_DIR": str(self.storage), "POSTTRAIN_TRAINER_PYTHON": str(python), "POSTTRAIN_LOG_LEVEL": "warning"}
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> Client:
        """A new client of it."""
        return Client(f"http://127.0.0.1:{self.port}")

    def start(self, **settings: object) -> float:
        """Start, and wait until jobs can be taken; returns the seconds it took."""
        env = self.env | {f"POSTTRAIN_{name.upper()}": str(value) for name, value in settings.items()}
        began = time.perf_counter()
        argv = [sys.executable, "-m", "posttrain_service", "serve", "--port", str(self.port)]
        self.process = subprocess.Popen(argv, env=env, start_new_session=True)
        with self.client as client:
            while not client.is_ready():
                time.sleep(0.01)
        return time.perf_counter() - began

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the server; its jobs go on."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)

    def clean(self) -> None:
        """End the server, and the jobs by their markers."""
        self.stop()
        for run in (self.storage / "jobs").glob("*"):
            proc.kill_marked(run.name)

    def submit(self, todo: str) -> str:
        """Make a job that does what is said; returns its id."""
        rows = [{"messages": [{"role": "user", "content": todo}, {"role": "assistant", "content": "yes"}]}]
        with self.client as client:
            return str(client.create_job({"model": "tiny", "dataset": {"rows": rows}})["job_uuid"])

    def until(self, job: str, *states: str) -> dict[str, Any]:
        """Wait for a state; returns the job."""
        with self.client as client:
            while (now := client.job(job))["status"] not in states:
                time.sleep(0.01)
        return now

    def cpu(self, seconds: float) -> float:
        """Share of a core that the server used meanwhile."""
        assert self.process is not None
        process = psutil.Process(self.process.pid)
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        time.sleep(seconds)
        return (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - began)

    def run_folder(self, job: str) -> Path:
        """Where the job's files are."""
        [(run_id,)] = self.sql("SELECT run_id FROM jobs WHERE job_uuid = ?", job)
        return self.storage / "jobs" / str(run_id)

    def sql(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of the service's own database."""
        with contextlib.closing(sqlite3.connect(self.storage / "posttrain.db", timeout=60)) as database, database:
            return database.execute(text, values).fetchall()

    def fill(self, count: int) -> None:
        """Copies of one ended job with its events, an hour apart in the past."""
        [(pattern,)] = self.sql("SELECT run_id FROM jobs WHERE state = 'cancelled' LIMIT 1")
        with contextlib.closing(sqlite3.connect(self.storage / "posttrain.db", timeout=60)) as database, database:
            names = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
            [row] = database.execute("SELECT * FROM jobs WHERE run_id = ?", (pattern,))
            events = database.execute("SELECT created_at, type, level, message, data FROM events WHERE run_id = ?", (pattern,)).fetchall()
            for number in range(count):
                ident = str(uuid.uuid4())
                copy = dict(zip(names, row, strict=True)) | {"run_id": ident, "job_uuid": ident, "keep": 1, "expires_at": None}
                copy["created_at"] -= 3600.0 * (number + 1)
                database.execute(f"INSERT INTO jobs ({', '.join(copy)}) VALUES ({', '.join('?' * len(copy))})", list(copy.values()))
                database.executemany(
                    "INSERT INTO events (run_id, created_at, type, level, message, data) VALUES (?, ?, ?, ?, ?, ?)",
                    [(ident, *event) for event in events],
                )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def latencies(ask: Callable[[], object], count: int) -> tuple[float, float]:
    """(p50, p99) in milliseconds of one request after another."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        ask()
        times.append((time.perf_counter() - began) * 1000)
    cut = statistics.quantiles(times, n=100)
    return cut[49], cut[98]


def throughput(port: int, path: str, seconds: float, connections: int = 4) -> float:
    """Requests a second over some kept connections."""
    counts = [0] * connections
    end = time.perf_counter() + seconds

    def hammer(number: int) -> None:
        connection = Connection(port)
        while time.perf_counter() < end:
            connection.ask("GET", path)
            counts[number] += 1

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


@contextlib.contextmanager
def hello() -> Iterator[int]:
    """A bare FastAPI application in a process of its own; gives its port."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", HELLO, str(port)])
    try:
        while True:
            with contextlib.suppress(OSError):
                Connection(port).ask("GET", "/hello")
                break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def say(name: str, value: str, wanted: str = "") -> None:
    """One line of the table."""
    print(f"{name:<52}{value:>24}   {wanted}", flush=True)


def measure_requests(service: Service, job: str, count: int) -> dict[str, tuple[float, float]]:
    """p50 and p99 of each kind of request, with a job that trains meanwhile."""
    connection = Connection(service.port)
    at = f"/post_training/jobs/{job}"
    row = {"messages": [{"role": "user", "content": "pace=1"}, {"role": "assistant", "content": "yes"}]}
    body = json.dumps({"model": "tiny", "dataset": {"rows": [row]}}).encode()
    made: list[bytes] = []
    found = {
        "GET job": latencies(lambda: connection.ask("GET", at), count),
        "GET list of 20 jobs": latencies(lambda: connection.ask("GET", "/post_training/jobs?limit=20"), count),
        "GET metrics, 100 points": latencies(lambda: connection.ask("GET", f"{at}/metrics?max_points=100"), count),
        "GET log tail": latencies(lambda: connection.ask("GET", f"{at}/logs?tail=100"), count),
        "POST job": latencies(lambda: made.append(connection.ask("POST", "/post_training/jobs", body)), count // 3),
    }
    for answer in made:
        connection.ask("POST", f"/post_training/jobs/{json.loads(answer)['job_uuid']}/cancel")
    return found


def load(service: Service, jobs: int, count: int) -> None:
    """Latencies with few and with many jobs, and the share of a bare FastAPI's requests."""
    service.start()
    pattern = service.submit("pace=0")
    service.until(pattern, "running")
    with service.client as client:
        client.cancel(pattern)
    service.until(pattern, "cancelled")
    tables: list[dict[str, tuple[float, float]]] = []
    for total in (100, jobs):
        service.stop()
        service.fill(total - (100 if tables else 0))
        service.start()
        job = service.submit("pace=5 busy=1")
        service.until(job, "running")
        (service.run_folder(job) / "attempts" / "1" / "logs" / "rank-0.log").write_text("a line of a log\n" * 1000)
        tables.append(measure_requests(service, job, count))
        if total == jobs:
            own = [throughput(service.port, f"/post_training/jobs/{job}", 3) for _ in range(3)]
            with hello() as port:
                bare = [throughput(port, "/hello", 3) for _ in range(3)]
        with service.client as client:
            client.cancel(job)
        service.until(job, "cancelled")
    for name in tables[1]:
        (few, _), (many, worst) = tables[0][name], tables[1][name]
        say(f"{name}: p50, p99 at {jobs:,} jobs", f"{many:.1f} ms, {worst:.1f} ms")
        say(f"{name}: p50 at {jobs:,} over 100 jobs", f"{many / few:.2f}", "< 1.3" if name in ("GET job", "GET list of 20 jobs") else "")
    ratios = [a / b for a, b in zip(sorted(own), sorted(bare), strict=True)]
    say("GET job, requests/s", f"{statistics.median(own):.0f}")
    say("bare FastAPI, requests/s", f"{statistics.median(bare):.0f}")
    say("GET job as a share of bare FastAPI", f"{min(ratios):.2f} to {max(ratios):.2f}", ">= 0.4")
    service.stop()


def supervision(service: Service, live: int = 50, queued: int = 950) -> None:
    """CPU of the loops with live jobs, and how soon a killed server's successor knows all of them again."""
    service.start(cpu_slots=live)
    jobs = [service.submit("pace=0") for _ in range(live)]
    for job in jobs:
        service.until(job, "running")
    time.sleep(3)
    say(f"supervision of {live} live jobs, share of a core", f"{service.cpu(20):.3f}", "< 0.02")
    rest = [service.submit("pace=0") for _ in range(queued)]
    assert len(set(rest)) == queued
    service.stop(signal.SIGKILL)
    proc.kill_marked(service.run_folder(jobs[-1]).name)
    began = time.perf_counter()
    ready = service.start(cpu_slots=live)
    ended = service.until(jobs[-1], "failed", "queued")
    say(f"restart with {live + queued:,} live and queued jobs: ready", f"{ready:.2f} s")
    say("  a run that died meanwhile is told as", f"{ended['reason']}, {time.perf_counter() - began:.2f} s", "< 2 s")
    with service.client as client:
        for job in [*rest, *jobs]:
            if client.job(job)["status"] not in ("failed", "cancelled"):
                client.cancel(job)
    for job in jobs:
        service.until(job, "failed", "cancelled")
    service.stop()


def logs(service: Service, count: int) -> None:
    """The end of a log of 2 GB."""
    service.start(log_quota_bytes=8 * 10**9)
    job = service.submit("pace=0")
    service.until(job, "running")
    log = service.run_folder(job) / "attempts" / "1" / "logs" / "rank-0.log"
    block = b"".join(b"line %d of a long log, with some words in it\n" % number for number in range(20_000))
    with log.open("wb") as file:
        while file.tell() < 2 * 10**9:
            file.write(block)
    connection = Connection(service.port)
    p50, p99 = latencies(lambda: connection.ask("GET", f"/post_training/jobs/{job}/logs?source=rank-0&tail=100"), count)
    say("tail of a log of 2 GB: p50, p99", f"{p50:.1f} ms, {p99:.1f} ms", "< 50 ms")
    with service.client as client:
        client.cancel(job)
    service.until(job, "cancelled")
    log.unlink()
    service.stop()


def followers(service: Service, count: int = 200) -> None:
    """CPU of the server while many follow the metrics of one job that makes two steps a second."""
    service.start()
    job = service.submit("pace=2")
    service.until(job, "running")
    request = f"GET /post_training/jobs/{job}/metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n".encode()
    sockets = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(count)]
    for one in sockets:
        one.sendall(request)
    time.sleep(3)
    heard = [0]
    done = threading.Event()

    def read() -> None:
        for one in sockets:
            one.setblocking(False)
        while not done.is_set():
            for one in sockets:
                with contextlib.suppress(BlockingIOError):
                    heard[0] += one.recv(1 << 16).count(b"\nid: ")
            time.sleep(0.1)

    reader = threading.Thread(target=read)
    reader.start()
    share = service.cpu(15)
    done.set()
    reader.join()
    say(f"{count} followers of one job, share of a core", f"{share:.2f}", "< 1")
    say("  events heard by all of them in 15 s", f"{heard[0]}")
    for one in sockets:
        one.close()
    with service.client as client:
        client.cancel(job)
    service.until(job, "cancelled")
    service.stop()


def main() -> None:
    """Measure and print a table; the right column says what is wanted."""
    parts: Sequence[str] = ("load", "supervision", "logs", "followers")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--only", choices=parts, action="append")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="posttrain-load-"))
    service = Service(folder)
    try:
        for part in options.only or parts:
            {
                "load": lambda: load(service, options.jobs, options.requests),
                "supervision": lambda: supervision(service),
                "logs": lambda: logs(service, options.requests),
                "followers": lambda: followers(service),
            }[part]()
    finally:
        service.clean()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
