"""`posttrain data ...`: look at data sets before any job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from posttrain_service.cli.common import (
    DEFAULT_SERVER,
    JsonOption,
    KeyFileOption,
    ServerOption,
    connected,
    fail,
    sentences,
    show_json,
)
from posttrain_service.cli.inspection import show_inspection
from posttrain_service.cli.request import with_settings
from posttrain_service.launch.tools import run_tool
from posttrain_service.work.rows import report_json
from posttrain_trainer.contract.conversation import TrainOn
from posttrain_trainer.contract.modelpath import neither_here_nor_on_a_hub
from posttrain_trainer.contract.rows import validate_file

app = typer.Typer(help="Check data sets.", no_args_is_help=True)

_INSPECT_TIMEOUT_S = 24 * 3600.0  # somebody waits and can end it


@app.callback()
def data() -> None:
    """Check data sets."""


@app.command()
def validate(
    file: Annotated[
        Path, typer.Argument(help="Rows as JSONL, JSON, CSV, ... on this machine.", exists=True, dir_okay=False)
    ],
    model: Annotated[str | None, typer.Option(help="Let the server count tokens by this model's tokenizer.")] = None,
    train_on: Annotated[
        TrainOn, typer.Option(help="Turns that are learned; a row without any is a bad one.")
    ] = "assistant",
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Say line by line what is wrong with a file; exit code 1 when something is. Needs a server only with --model."""
    report = _here(file, train_on) if model is None else _there(file, model, train_on, server, key_file)
    if as_json:
        show_json(report)
    else:
        for error in report["errors"]:
            print(f"{file}:{error['line']}: {error['message']}")
        for remark in report["warnings"]:
            print(f"{file}:{remark['lines'][0]}: warning: {remark['message']} ({remark['rows']} in all)")
        unlisted = report["num_errors"] - len(report["errors"])
        more = f" ({unlisted} not listed)" if unlisted else ""
        print(f"{file}: {report['rows']} rows, format {report['format']}, {report['num_errors']} errors{more}")
        if report.get("tokens"):
            print(f"tokens: {report['tokens']}")
    if not report["valid"]:
        raise typer.Exit(1)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="Rows as JSONL, JSON, CSV, ... on this machine.", exists=True, dir_okay=False)],
    model: Annotated[str, typer.Option(help="Folder of a model on this machine, or an id on the hub.")],
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Samples to show.")] = 3,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set an argument of the run, e.g. max_seq_len=2048.")
    ] = None,
    trainer_python: Annotated[
        str, typer.Option("--trainer-python", envvar="POSTTRAIN_TRAINER_PYTHON", help="Interpreter that has torch and the trainer.")
    ] = sys.executable,
    as_json: JsonOption = False,
) -> None:
    """Show what a model would be trained on: samples with the trained part marked, counts, lengths, packing. No server."""
    folder = Path(model).expanduser()
    with sentences():
        if (refusal := neither_here_nor_on_a_hub(model)) is not None:
            fail(refusal)
        payload = {
            "data_path": str(file.absolute()), "model_path": str(folder.absolute()) if folder.is_dir() else model,
            "train_args": with_settings({}, settings or ()), "examples": rows,
        }  # fmt: skip
        report = run_tool(Path(trainer_python), "inspect", payload, _INSPECT_TIMEOUT_S)
    if as_json:
        show_json(report)
    else:
        show_inspection(Console(width=None if sys.stdout.isatty() else 10_000, highlight=False), str(file), report)


def _here(file: Path, train_on: TrainOn) -> dict[str, Any]:
    with sentences():
        return report_json(validate_file(file, train_on=train_on))


def _there(file: Path, model: str, train_on: TrainOn, server: str, key_file: Path | None) -> dict[str, Any]:
    with connected(server, key_file) as client:
        file_id = client.upload(file)["id"]
        try:
            return client.validate(file_id, model=model, train_on=train_on)
        finally:
            client.delete_file(file_id)
    raise AssertionError("connected() never swallows an error")
