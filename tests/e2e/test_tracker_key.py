"""Weights & Biases by the server's key, as a request over OpenAI's API asks for it: the real package against a stand-in for its server."""

from __future__ import annotations

import base64
import gzip
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.client import Client
from posttrain_trainer.testing import tiny_model, tiny_rows, write_rows

from .conftest import Served, end
from .test_real_run import wait_for

KEY = "0123456789abcdef" * 2 + "01234567"
PROJECT = {"id": "p", "name": "ours", "entity": {"id": "e", "name": "team"}}
BUCKET = {
    "id": "r", "name": "r", "displayName": "first", "description": "", "config": "{}", "sweepName": None, "historyLineCount": 0, "project": PROJECT,
}  # fmt: skip


class Tracker(http.server.ThreadingHTTPServer):
    """Answers what the package asks; keeps whose key came, and the files that were sent.

    Args:
        broken: Leave out what the package relies on when it ends a run: its core process crashes then.
    """

    def __init__(self, *, broken: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.broken = broken
        self.keys: set[str] = set()
        self.sent: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.sent.append(body)
        data: dict[str, Any] = {
            "viewer": {"id": "u", "entity": "team", "username": "u", "flags": "{}", "teams": {"edges": []}},
            "serverInfo": {"cliVersionInfo": {"max_cli_version": "9.9.9"}, "latestLocalVersionInfo": None, "features": []},
            "upsertBucket": {"bucket": BUCKET, "inserted": True},
        }
        if not self.broken:
            files = [{"name": name, "uploadUrl": f"{self.address}/upload"} for name in (body.get("variables") or {}).get("files") or ()]
            data["createRunFiles"] = {"runID": "r", "uploadHeaders": [], "files": files}
        return {"data": data, "exitcode": None}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Tracker

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (authorization := self.headers.get("Authorization")) is not None:
            self.server.keys.add(base64.b64decode(authorization.removeprefix("Basic ")).decode())
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        out = json.dumps({} if self.path == "/upload" else self.server.answer(json.loads(raw or "{}"))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    do_GET = do_PUT = do_POST

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def python(repository: Path, tmp_path: Path) -> Path:
    """An interpreter with the trainer and with what `make tracking` installs."""
    [*found] = (repository / ".cache" / "tracking" / "lib").glob("python*/site-packages/wandb")
    if not found:
        pytest.skip("wandb is not installed: it is large, and asked for by `make tracking`")
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{found[0].parent}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(params=[False, True], ids=["tracker", "tracker whose core crashes"])
def tracker(request: pytest.FixtureRequest) -> Iterator[Tracker]:
    server = Tracker(broken=request.param)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_tracked_by_the_servers_key(python: Path, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = tmp_path / "storage"
    tiny_model(storage / "models" / "tiny")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", tracker.address)
    monkeypatch.setenv("POSTTRAIN_TRAINER_PYTHON", str(python))
    served = Served(storage)
    served.start()
    try:
        with Client(served.address) as client:
            rows = client.upload(write_rows(tmp_path / "rows.jsonl", tiny_rows(24)))["id"]
            integrations = [{"type": "wandb", "wandb": {"project": "ours", "name": "first"}}]
            request = {"model": "tiny", "training_file": rows, "integrations": integrations}
            job = client._json("POST", "/v1/fine_tuning/jobs", json=request)["id"]
            ended = wait_for(client, job, lambda now: now["status"] in ("succeeded", "failed", "cancelled"))
            steps = len(client.metrics(job))
            events = list(client.events(job))
    finally:
        end(storage, served.process)
    assert ended["status"] == "succeeded", ended["error"]
    [shown] = ended["trackers"]
    assert shown["kind"] == "wandb"
    assert shown["url"].startswith(f"{tracker.address}/")
    assert shown["url"] in [event["data"].get("url") for event in events]
    assert tracker.keys == {f"api:{KEY}"}
    lost = [warning for warning in ended["warnings"] if "the wandb logger failed" in warning]
    assert len(lost) == tracker.broken
    history = [json.loads(line) for body in tracker.sent for line in ((body.get("files") or {}).get("wandb-history.jsonl") or {}).get("content", ())]
    if not tracker.broken:
        assert [point["step"] for point in history] == list(range(1, steps + 1))
        assert all("train/loss" in point for point in history)
    leaks = [path for path in storage.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert leaks == [], "the key is in nothing that is stored"
