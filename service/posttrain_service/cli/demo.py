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

from posttrain_service.cli.demo_http import DemoError, Service, UnknownModel
from posttrain_service.cli.demo_model import BaseModel, ask, obtain
from posttrain_service.cli.demo_screen import compare, farewell, follow, told
from posttrain_service.cli.demo_server import candidates, pid_of, start
from posttrain_service.settings import Settings

DATA = resources.files("posttrain_service.cli") / "demo_data" / "observatory.jsonl"
"""Conversations about an observatory that exists only here, so no model can know it beforehand."""

QUESTIONS = (
    ("Which soup will I get at midnight up at Varnholt?", "fennel"),
    ("What is the name of the cat that lives with the astronomers of Varnholt?", "Perihelion"),
    ("I'd like to take the boat to Skerrow. On which days does it go?", "Tuesdays and Fridays"),
)
"""Questions in a wording that the data does not have, and the word of the data that a right answer holds."""

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
        Path | None, typer.Option(help="Folder for model, database and jobs; default: the service's own.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(envvar="POSTTRAIN_SERVER", help="Use the service at this address instead of finding or starting one."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Train anew, even if an earlier demo's job can be shown.")] = False,
) -> None:
    """Fine-tune SmolLM2-135M over HTTP on sample data, and compare its answers before and after."""
    console = Console(highlight=False)
    settings = Settings() if storage_dir is None else Settings(storage_dir=storage_dir)
    try:
        run(console, settings, server, again=again)
    except DemoError as error:
        Console(stderr=True, highlight=False).print(f"posttrain demo: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("\nStopped watching. The service and its job go on; say the same again to see how far it is.")
        raise typer.Exit(130) from None


def run(console: Console, settings: Settings, server: str | None, *, again: bool) -> None:
    """The whole demo.

    Raises:
        DemoError: Something that it needs cannot be had; one sentence says what and how to help.
    """
    model = obtain(settings, console)
    outcome = _train_somewhere(console, settings, model, server, again=again)
    questions = [question for question, _ in QUESTIONS]
    with console.status("Asking the model before and after training"):
        before = ask(settings, model, None, questions)
        after = ask(settings, model, outcome.adapter, questions)
    compare(console, QUESTIONS, before, after)
    farewell(console, settings, outcome.address, outcome.job, outcome.adapter, pid_of(settings, outcome.address))


def _train_somewhere(
    console: Console, settings: Settings, model: BaseModel, server: str | None, *, again: bool
) -> Outcome:
    for address in candidates(settings, server):
        try:
            return _train(console, settings, model, address, again=again)
        except UnknownModel as error:
            if server is not None:
                raise DemoError(f"the service at {address} refused the model: {error}") from error
            console.print(f"The service at {address} does not have the model; starting another one.")
    return _train(console, settings, model, start(console, settings), again=again)


def _train(console: Console, settings: Settings, model: BaseModel, address: str, *, again: bool) -> Outcome:
    rows = DATA.read_bytes()
    recipe = {"model": model.name, **RECIPE}
    mark = hashlib.sha256(rows + json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    with Service(address) as service:
        told(console, "service", f"{address} (posttrain {service.version()})")
        job = None if again else service.find_job({"demo": mark})
        if job is None:
            file_id = service.upload(f"observatory-{mark}.jsonl", rows)
            told(console, "data", _checked(service.validate(file_id), file_id))
            job = service.create({"name": "demo", "dataset": file_id, "metadata": {"demo": mark}, **recipe})
            told(console, "job", f"{job['job_uuid']} (LoRA, {recipe['training']['num_epochs']} epochs)")
        else:
            told(console, "job", f"{job['job_uuid']} of an earlier run (--again trains anew)")
        job = follow(console, service, job)
        with console.status("Downloading the checkpoint"):
            adapter = service.download(job["job_uuid"], settings.storage_dir / "demo")
    return Outcome(job, address, adapter)


def _checked(report: dict[str, Any], file_id: str) -> str:
    if not report["valid"]:
        first = report["errors"][0]
        raise DemoError(f"the sample data was found invalid in line {first['line']}: {first['message']}")
    return f"{report['rows']} conversations, uploaded as {file_id} and found valid"
