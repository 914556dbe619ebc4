"""What a job's start costs: seconds of each part from the POST to the first optimizer step, over HTTP.

    python benchmarks/startup.py --model FOLDER [--runs 3]

FOLDER is a model in Hugging Face layout. Starts a service of its own on a temporary storage directory; a first run warms
the caches of the disk and isn't counted. Parts: queue = POST sent until the scheduler launched it; shim = until the shim
holds its lock and has started torchrun; torchrun = until a rank begins its first line; then the rank's own parts.

Between the runs a bare process imports torch and transformers and loads the same weights, as any script has to. `rank /
bare` is what a rank takes from its first line to the beginning of its first step (import, load, data, resume) over that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain_service.client import Client, ServerGone

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n} plus one?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
    for n in range(8)
]
BARE = """
import sys, time
began = time.perf_counter()
import torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
print(time.perf_counter() - began)
"""
PARTS = ("queue", "shim", "torchrun", "import", "load", "data", "resume", "first_step")


@contextlib.contextmanager
def served(storage: Path) -> Iterator[Client]:
    """A service of our own, up for the length of the context."""
    log = storage / "server.log"
    port = _free_port()
    argv = [sys.executable, "-m", "posttrain_service", "serve", "--port", str(port), "--storage-dir", str(storage)]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            _wait_until_up(client, log)
            yield client
    finally:
        process.terminate()
        process.wait(20)


def bare(model: Path) -> float:
    """Seconds of the imports and of loading the weights, from a script's first line."""
    ran = subprocess.run([sys.executable, "-c", BARE, str(model)], capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1])


def measure(client: Client, model: str) -> dict[str, float]:
    """One job: the seconds of each part."""
    sent = time.time()
    training = {"max_steps": 1, "effective_batch_size": 8, "dtype": "fp32", "max_seq_len": 256}
    job = client.create_job({"model": model, "dataset": {"rows": ROWS}, "training": training})["job_uuid"]
    answered = time.time()
    while (now := client.job(job))["status"] not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.05)
    if now["status"] != "succeeded":
        raise SystemExit(f"the job {now['status']}: {now['error']}")
    events = _events(client, job)
    first_step = next(event for event in events if "startup_s" in event["data"])
    startup: dict[str, float] = first_step["data"]["startup_s"]
    launched, started = _seconds(now["scheduled_at"]), _seconds(now["started_at"])
    rank_began = first_step["at"] - sum(startup.values())
    found = {"queue": launched - sent, "shim": started - launched, "torchrun": rank_began - started, **startup}
    return {"answer": answered - sent, **found, "total": first_step["at"] - sent}


def _events(client: Client, job: str) -> list[dict[str, Any]]:
    return [{"data": event.get("data") or {}, "at": _seconds(event["created_at"])} for event in client.events(job)]


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(client: Client, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            client.version()
        except ServerGone:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"the service did not start:\n{log.read_text(errors='replace')}")


def _place(model: Path, models: Path) -> str:
    """A copy of the model among the service's models, by hard links where the disk allows."""
    target = models / model.name
    target.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file():
            try:
                os.link(file, target / file.name)
            except OSError:
                shutil.copyfile(file, target / file.name)
    return model.name


def main() -> None:
    """Measure and print a table: median, least and most seconds of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-startup-") as folder:
        storage = Path(folder)
        model = _place(options.model.resolve(), storage / "models")
        with served(storage) as client:
            measure(client, model)
            runs = [measure(client, model) | {"bare": bare(options.model)} for _ in range(options.runs)]
    print(f"{'part':<12}{'median':>9}{'least':>9}{'most':>9}   seconds, {options.runs} runs")
    for part in ("answer", *PARTS, "total", "bare"):
        values = [run[part] for run in runs]
        print(f"{part:<12}{statistics.median(values):>9.3f}{min(values):>9.3f}{max(values):>9.3f}")
    together = [run["queue"] + run["shim"] for run in runs]
    print(f"{'queue + shim':<12}{statistics.median(together):>9.3f}{min(together):>9.3f}{max(together):>9.3f}")
    ratios = [sum(run[part] for part in ("import", "load", "data", "resume")) / run["bare"] for run in runs]
    print(f"{'rank / bare':<12}{statistics.median(ratios):>9.2f}{min(ratios):>9.2f}{max(ratios):>9.2f}   (no unit)")


if __name__ == "__main__":
    main()
