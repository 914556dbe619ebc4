"""Find a running service, or start one that goes on after the demo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from posttrain_service.cli.demo_screen import DemoError, busy
from posttrain_service.client import ApiError, Client, ServerGone
from posttrain_service.settings import Settings

START_TIMEOUT_S = 60.0
STARTED: list[subprocess.Popen[bytes]] = []
"""Services that this process started. They are meant to outlive it, so nothing here ends or waits for them."""


def candidates(settings: Settings, server: str | None) -> Iterator[str]:
    """Addresses of services that answer, the likeliest first: the one asked for, the last demo's, the default port's.

    Raises:
        DemoError: A service was asked for by address and does not answer as one.
    """
    if server is not None:
        if not answers(server):
            raise DemoError(
                f"no posttrain service answers at {server}; start one (posttrain serve) or leave the address out"
            )
        yield server.rstrip("/")
        return
    # Port 0 asks for any free port: nobody can be there.
    known = [_recorded(settings), f"http://127.0.0.1:{settings.port}" if settings.port else None]
    for address in dict.fromkeys(address for address in known if address):
        if answers(address):
            yield address


def answers(address: str) -> bool:
    """Whether a posttrain service answers at `address`."""
    try:
        with Client(address) as client:
            return {"version", "contract"} <= set(client.version())
    except (ApiError, ServerGone, ValueError):
        return False


def start(console: Console, settings: Settings) -> str:
    """Start a service that outlives this process and wait until it is ready; returns its address.

    Raises:
        DemoError: It ended, or was not ready in time; the end of its log is told.
    """
    settings.storage_dir.mkdir(parents=True, exist_ok=True)
    port = _free_port(settings.port)
    address = f"http://127.0.0.1:{port}"
    log = settings.storage_dir / "demo-server.log"
    argv = [sys.executable, "-m", "posttrain_service", "serve", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--storage-dir", str(settings.storage_dir)]
    environment = {key: value for key, value in os.environ.items() if key != "POSTTRAIN_SERVER"}
    with busy(console, "service", "starting"), log.open("ab") as out:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        _wait(process, address, log)
    STARTED.append(process)
    record = settings.storage_dir / "demo-server.json"
    record.write_text(json.dumps({"address": address, "pid": process.pid}), encoding="utf-8")
    return address


def pid_of(settings: Settings, address: str) -> int | None:
    """The process number of the service at `address`, when a demo started it."""
    data = _record(settings)
    return int(data["pid"]) if data and data["address"] == address else None


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(
                f"the service ended at once (exit code {process.returncode}); the end of {log}:\n{_end(log)}"
            )
        if answers(address) and _ready(address):
            return
        time.sleep(0.2)
    process.terminate()
    raise DemoError(f"the service was not ready after {START_TIMEOUT_S:.0f} s; the end of {log}:\n{_end(log)}")


def _ready(address: str) -> bool:
    with Client(address) as client:
        return client.is_ready()


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DemoError("no free port on 127.0.0.1")


def _recorded(settings: Settings) -> str | None:
    data = _record(settings)
    return str(data["address"]) if data else None


def _record(settings: Settings) -> dict[str, str] | None:
    try:
        data = json.loads((settings.storage_dir / "demo-server.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return data if isinstance(data, dict) and {"address", "pid"} <= set(data) else None


def _end(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
