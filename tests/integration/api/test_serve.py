"""`posttrain serve` as a process: signals, streams at its end, what it imports and how much memory it takes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest

from posttrain_service.cli.serve import _listen
from posttrain_service.client import Client, ServerGone
from posttrain_trainer.contract.rundir import ENV_RUN_ID


@contextmanager
def server(storage, *flags, env=None):
    """The command on a free port; gives the process and its address. It is killed if the test leaves it running."""
    argv = [sys.executable, "-m", "posttrain_service", "serve", "--port", "0", "--storage-dir", str(storage), *flags]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    try:
        for line in process.stderr:
            if "posttrain serves at " in line:
                yield process, line.split("posttrain serves at ")[1].split(";")[0]
                break
        else:
            raise AssertionError(f"the server ended with {process.wait()}")
    finally:
        if process.poll() is None:
            process.kill()
        print(process.communicate()[1])


@pytest.fixture
def storage(tmp_path):
    """A storage folder with a model that no trainer will ever read."""
    model = tmp_path / "storage/models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}))
    (model / "model.safetensors").write_bytes(b"\0" * 64)
    return tmp_path / "storage"


@pytest.fixture
def sleeper(tmp_path):
    """An interpreter that prints a line and then waits instead of training."""
    script = tmp_path / "sleeper"
    script.write_text('#!/bin/sh\necho "hello from the trainer"\nexec sleep 300\n')
    script.chmod(0o755)
    return script


def marked(storage):
    """Processes of jobs below that storage folder."""
    runs = {path.name for path in (storage / "jobs").iterdir()}
    return [p for p in psutil.process_iter() if _run_of(p) in runs]


def _run_of(process):
    try:
        return process.environ().get(ENV_RUN_ID)
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return None


REQUEST = {"model": "tiny", "dataset": {"rows": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]}}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_its_streams_and_leaves_the_job(storage, sleeper, number):
    flags = ("--trainer-python", str(sleeper))
    with server(storage, *flags) as (process, address):
        with Client(address) as client:
            job = client.create_job(REQUEST)["job_uuid"]
            stream = client.stream(job, "logs", source="torchrun")
            first = next(stream)
            assert (first.event, first.data["text"]) == ("log", "hello from the trainer\n")
            begun = time.monotonic()
            process.send_signal(number)
            with pytest.raises(ServerGone, match="the job goes on"):
                next(stream)
        assert process.wait(10) == 0
        assert time.monotonic() - begun < 10
    assert marked(storage)
    with server(storage, *flags, "--stop-jobs") as (process, address):
        with Client(address) as client:
            assert client.job(job)["status"] in ("launching", "running")
        process.send_signal(number)
        assert process.wait(40) == 0
    assert not marked(storage)
    with server(storage, *flags) as (_, address), Client(address) as client:
        assert (client.job(job)["status"], client.job(job)["attempt"]) == ("cancelled", 1)


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_in_a_sentence(storage, tmp_path):
    with server(storage) as (_, address):
        port = httpx.URL(address).port
        argv = [sys.executable, "-m", "posttrain_service", "serve", "--port", str(port), "--storage-dir", str(tmp_path / "other")]
        second = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"port {port}: Address already in use" in second.stderr
    assert "Traceback" not in second.stderr
    assert not (tmp_path / "other").exists()


LIGHT = """
import sys, psutil
from posttrain_service.app import create_app
from posttrain_service.settings import Settings
import posttrain_service.cli.main
from fastapi.testclient import TestClient
with TestClient(create_app(Settings(storage_dir=sys.argv[1])), base_url="http://127.0.0.1") as http:
    rows = '{"prompt": "a", "completion": "b"}\\n' * 20000
    file = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows)}).json()
    report = http.post("/post_training/datasets/validate", json={"dataset": file["id"]}).json()
    assert report["valid"] and report["rows"] == 20000, report
    assert http.get("/post_training/jobs").json()["data"] == []
    rss = psutil.Process().memory_info().rss
heavy = {"torch", "transformers", "numpy", "peft", "accelerate", "safetensors", "datasets"} & set(sys.modules)
print(rss, sorted(heavy))
"""


def test_the_service_is_light(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rss, heavy = done.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert int(rss) < 150_000_000


def test_no_answer_waits_for_a_delayed_acknowledgement():
    """The headers and the body of an answer are two packets: without TCP_NODELAY the second one waited 40 ms."""
    with _listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
