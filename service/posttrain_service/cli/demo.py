"""`posttrain demo`: fine-tune a real small model over HTTP, from nothing, and show what it learned.

Everything between the model's conversion and its answers goes through the HTTP API, as any client would do it. A second
run finds the model, the running service and the finished job, and goes straight to the answers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from posttrain_service.cli.apikey import read_key
from posttrain_service.cli.common import KeyFileOption, say, sentences
from posttrain_service.cli.demo_download import fetch
from posttrain_service.cli.demo_model import BaseModel, ask, obtain
from posttrain_service.cli.demo_screen import DemoError, busy, compare, farewell, follow, told
from posttrain_service.cli.demo_server import candidates, pid_of, start
from posttrain_service.client import ApiError, Client
from posttrain_service.settings import Settings

DATA = resources.files("posttrain_service.cli") / "demo_data" / "observatory.jsonl"
"""Conversations about an observatory that exists only here, so no model can know it beforehand."""

QUESTIONS = (
    ("Which soup will I get at midnight up at Varnholt?", "fennel"),
    ("What is the name of the cat that lives with the astronomers of Varnholt?", "Perihelion"),
    ("I'd like to take the boat to Skerrow. On which days does it go?", "Tuesdays and Fridays"),
)
"""Questions in a wording that the data does not have, and the words of the data that a right answer holds."""

RECIPE: dict[str, Any] = {
    "adapter": {"kind": "lora", "rank": 16, "alpha": 32},
    "training": {
        "num_epochs": 3,
        "effective_batch_size": 8,
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "max_seq_len": 512,
        "max_batch_len": 1024,
    },
    "checkpoints": {"keep_last": 1},
}
"""Three epochs of LoRA: some minutes on two CPU cores."""


@dataclass(frozen=True)
class Outcome:
    """What the service made: the job, the service's address, and the adapter as a folder on this machine."""

    job: dict[str, Any]
    address: str
    adapter: Path


def demo(
    storage_dir: Annotated[
        Path | None, typer.Option(help="Folder for model, database and jobs; the service's own unless told.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(envvar="POSTTRAIN_SERVER", help="Use this service instead of finding or starting one.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Train anew, even if an earlier demo's job can be shown.")] = False,
    key_file: KeyFileOption = None,
) -> None:
    """Fine-tune SmolLM2-135M over HTTP on sample data, and compare its answers before and after."""
    console = Console(highlight=False)
    settings = Settings() if storage_dir is None else Settings(storage_dir=storage_dir)
    try:
        with sentences():
            run(console, settings, server, read_key(key_file), again=again)
    except DemoError as error:
        for line in f"error: {error}".splitlines():
            say(line)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("\nStopped watching. The service and its job go on; say the same again to see how far it is.")
        raise typer.Exit(130) from None


def run(console: Console, settings: Settings, server: str | None, api_key: str | None, *, again: bool) -> None:
    """The whole demo.

    Raises:
        DemoError: Something that it needs cannot be had; one sentence says what and how to help.
        ApiError: The service refused a request.
        ServerGone: The service went away.
    """
    model = obtain(settings, console)
    outcome = _train_somewhere(console, settings, model, server, api_key, again=again)
    questions = [question for question, _ in QUESTIONS]
    with busy(console, "asking", "the model before and after training (half a minute or so)"):
        before, after = ask(settings, model, outcome.adapter, questions)
    compare(console, QUESTIONS, before, after)
    farewell(console, settings, outcome.address, outcome.job, outcome.adapter, pid_of(settings, outcome.address))


def _train_somewhere(
    console: Console, settings: Settings, model: BaseModel, server: str | None, api_key: str | None, *, again: bool
) -> Outcome:
    for address in candidates(settings, server):
        try:
            return _train(console, settings, model, address, api_key, again=again)
        except ApiError as error:
            if server is not None or error.param != "model":
                raise
            console.print(f"The service at {address} does not have the model; starting another one.")
    return _train(console, settings, model, start(console, settings), api_key, again=again)


def _train(
    console: Console, settings: Settings, model: BaseModel, address: str, api_key: str | None, *, again: bool
) -> Outcome:
    recipe = {"model": model.name, **RECIPE}
    mark = hashlib.sha256(DATA.read_bytes() + json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    with Client(address, api_key=api_key) as client:
        told(console, "service", f"{address} (posttrain {client.version()['version']}); the dashboard is there too")
        job = None if again else _earlier(client, mark)
        if job is None:
            job = _create(console, client, mark, recipe)
        else:
            told(console, "job", f"{job['job_uuid']} of an earlier run (--again trains anew; make demo ARGS=--again)")
        job = follow(console, client, job, address)
        with busy(console, "fetching", "the checkpoint"):
            adapter = fetch(client, job["job_uuid"], settings.storage_dir / "demo")
    return Outcome(job, address, adapter)


def _earlier(client: Client, mark: str) -> dict[str, Any] | None:
    """The newest job of the same recipe and data that succeeded or still can."""
    jobs = client.jobs(**{"metadata[demo]": mark, "limit": 20})
    return next((job for job in jobs if job["status"] not in ("failed", "cancelled", "paused")), None)


def _create(console: Console, client: Client, mark: str, recipe: dict[str, Any]) -> dict[str, Any]:
    with resources.as_file(DATA) as path:
        file_id = client.upload(path)["id"]
    report = client.validate(file_id)
    if not report["valid"]:
        first = report["errors"][0]
        raise DemoError(f"the sample data was found invalid in line {first['line']}: {first['message']}")
    told(console, "data", f"{report['rows']} conversations, uploaded as {file_id} and found valid")
    job = client.create_job({"name": "demo", "dataset": file_id, "metadata": {"demo": mark}, **recipe})
    told(console, "job", f"{job['job_uuid']} (LoRA, {recipe['training']['num_epochs']} epochs)")
    return job
