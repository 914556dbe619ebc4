"""Download, progress and the search for a service, against a stand-in for the HTTP API."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from posttrain_service.cli import demo_model, demo_screen, demo_server
from posttrain_service.cli.demo_download import fetch
from posttrain_service.cli.demo_screen import DemoError, compare, follow
from posttrain_service.cli.demo_server import candidates, pid_of, start
from posttrain_service.client import Client
from posttrain_service.settings import Settings

WEIGHTS = b"weights" * 1000
FOLDER = "j-step-000100"


def archive(names: dict[str, bytes], link: str | None = None) -> bytes:
    """A checkpoint's tar: all names below the folder that the service puts there."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in names.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}" if not name.startswith("/") else name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        if link is not None:
            member = tarfile.TarInfo(f"{FOLDER}/model/link")
            member.type, member.linkname = tarfile.SYMTYPE, link
            tar.addfile(member)
    return out.getvalue()


def checkpoint(step: int, content: bytes = WEIGHTS) -> dict[str, Any]:
    file = {"path": "model/adapter.safetensors", "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {"id": f"step-{step:06d}", "step": step, "files": [file, {"path": "state/x", "size_bytes": 1, "sha256": "0"}]}


class Api:
    """Answers by path; counts what was asked for."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, list[str]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        answer = self.answers[request.url.path]
        if isinstance(answer, list) and request.url.path.startswith("/post_training/jobs/j") and "/" not in request.url.path[21:]:
            answer = answer.pop(0)
        return httpx.Response(200, content=answer) if isinstance(answer, bytes) else httpx.Response(200, json=answer)


def client(api: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://service", transport=httpx.MockTransport(api))


def checkpoints_and(tar: bytes, *steps: int) -> Api:
    page = {"data": [checkpoint(step) for step in steps], "has_more": False}
    return Api({"/post_training/jobs/j/checkpoints": page, f"/post_training/jobs/j/checkpoints/step-{max(steps):06d}/archive": tar})


def test_the_newest_checkpoint_is_fetched_once(tmp_path: Path) -> None:
    api = checkpoints_and(archive({"model/adapter.safetensors": WEIGHTS}), 20, 100)
    for _ in range(2):
        folder = fetch(client(api), "j", tmp_path)
        assert (folder / "adapter.safetensors").read_bytes() == WEIGHTS
    assert folder == tmp_path / FOLDER / "model"
    assert [path for path in api.asked if path.endswith("/archive")] == ["/post_training/jobs/j/checkpoints/step-000100/archive"]
    assert not list(tmp_path.rglob("*.tar"))


def test_a_checkpoint_that_arrives_damaged_is_refused(tmp_path: Path) -> None:
    api = checkpoints_and(archive({"model/adapter.safetensors": b"other"}), 100)
    with pytest.raises(DemoError, match="damaged"):
        fetch(client(api), "j", tmp_path)


@pytest.mark.parametrize(
    "tar", [archive({"../../outside": b"x"}), archive({"/tmp/outside": b"x"}), archive({}, link="/etc/passwd")]
)
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, tar: bytes) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(DemoError, match="not a file inside"):
        fetch(client(checkpoints_and(tar, 100)), "j", folder)
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "a" / "outside").exists()


def test_a_job_without_checkpoint_is_told(tmp_path: Path) -> None:
    api = Api({"/post_training/jobs/j/checkpoints": {"data": [], "has_more": False}})
    with pytest.raises(DemoError, match="no checkpoint"):
        fetch(client(api), "j", tmp_path)


def job(status: str, **more: Any) -> dict[str, Any]:
    return {"job_uuid": "j", "status": status, "reason": None, "error": None, "progress": None, "metrics": None} | more


STATES = [
    job("queued"),
    job("launching"),
    job("running", progress={"phase": "load", "step": 0, "total_steps": None}),
    job(
        "running",
        progress={"phase": "train", "step": 30, "total_steps": 60, "tokens_per_s": 200.4, "eta_s": 61.0},
        metrics={"loss": 1.25},
    ),
    job("succeeded", progress={"step": 60, "total_steps": 60, "tokens_seen": 28017}, metrics={"loss": 0.0625}),
]
POINTS = [{"step": 1, "loss": 3.0}, {"step": 60, "loss": 0.0625}]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_followed_to_the_end(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(demo_screen, "POLL_S", 0.0)
    monkeypatch.setattr(demo_screen, "PLAIN_EVERY_S", 0.0)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)
    ended = follow(console, client(Api({"/post_training/jobs/j": STATES[1:], "/post_training/jobs/j/metrics": {"data": POINTS}})), STATES[0], "http://service")
    assert ended["status"] == "succeeded"
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "60 steps, 28,017 tokens, loss 3.000 at first, 0.062 at last" in shown
    if not terminal:
        assert "step 30 of 60  loss 1.250  200 tokens/s  1:01 left" in shown


@pytest.mark.parametrize("status", ["failed", "cancelled", "paused"])
def test_another_end_is_an_error_with_its_reason(status: str) -> None:
    ended = job(status, reason="out_of_memory", error={"message": "no memory left"})
    with pytest.raises(DemoError, match=f"{status}: no memory left .*--server http://service"):
        follow(Console(file=io.StringIO()), client(Api({})), ended, "http://service")


def test_answers_are_asked_for_once_and_a_cut_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def tool(python: object, name: str, payload: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        asked.append(payload)
        return {"answers": ["Fennel."], "cut": [False], "base_answers": ["It is a long"], "base_cut": [True]}

    monkeypatch.setattr(demo_model, "run_tool", tool)
    model, adapter = demo_model.BaseModel("m", tmp_path / "m"), tmp_path / "j-step-000060" / "model"
    adapter.mkdir(parents=True)
    for _ in range(2):
        assert demo_model.ask(Settings(), model, adapter, ["Soup?"]) == (["It is a long ..."], ["Fennel."])
    assert len(asked) == 1
    demo_model.ask(Settings(), model, adapter, ["Cat?"])
    assert [payload["prompts"] for payload in asked] == [["Soup?"], ["Cat?"]]


def test_what_is_waited_for_is_said_where_the_output_is_piped() -> None:
    console = Console(file=io.StringIO(), width=120)
    with demo_screen.busy(console, "service", "starting"):
        assert console.file.getvalue() == " service  starting\n"  # type: ignore[attr-defined]


def test_answers_are_compared_and_counted() -> None:
    console = Console(file=io.StringIO(), width=200)
    compare(console, [("Soup?", "fennel"), ("[Cat]?", "Perihelion")], ["[red]Tomato", "?"], ["Fennel soup.", "No idea"])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]Tomato" in shown
    assert "[Cat]?" in shown
    assert "Right answers: 0 of 2 before, 1 of 2 after." in shown


def test_services_that_answer_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(storage_dir=tmp_path, port=9)
    (tmp_path / "demo-server.json").write_text(json.dumps({"address": "http://127.0.0.1:7", "pid": 1}))
    monkeypatch.setattr(demo_server, "answers", lambda address: True)
    assert list(candidates(settings, None)) == ["http://127.0.0.1:7", "http://127.0.0.1:9"]
    assert list(candidates(settings, "http://there/")) == ["http://there"]
    assert pid_of(settings, "http://127.0.0.1:7") == 1
    assert pid_of(settings, "http://127.0.0.1:9") is None
    monkeypatch.setattr(demo_server, "answers", lambda address: False)
    assert list(candidates(settings, None)) == []
    with pytest.raises(DemoError, match="no posttrain service answers at http://there"):
        list(candidates(settings, "http://there"))


def test_a_service_that_ends_at_once_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(storage_dir=tmp_path, port=0)
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho the database is broken\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(DemoError, match=r"exit code 3(.|\n)*the database is broken"):
        start(Console(file=io.StringIO()), settings)
    assert not (tmp_path / "demo-server.json").exists()
