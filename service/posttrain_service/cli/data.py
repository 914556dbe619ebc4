"""`posttrain data ...`: look at data sets before any job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain_service.cli.common import (
    DEFAULT_SERVER,
    JsonOption,
    KeyOption,
    ServerOption,
    connected,
    sentences,
    show_json,
)
from posttrain_trainer.contract.rows import validate_file

app = typer.Typer(help="Check data sets.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Check data sets."""


@app.command()
def validate(
    file: Annotated[
        Path, typer.Argument(help="Rows as JSONL, JSON, CSV, ... on this machine.", exists=True, dir_okay=False)
    ],
    model: Annotated[str | None, typer.Option(help="Let the server count tokens by this model's tokenizer.")] = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    api_key: KeyOption = None,
) -> None:
    """Say line by line what is wrong with a file; exit code 1 when something is. Needs a server only with --model."""
    report = _here(file) if model is None else _there(file, model, server, api_key)
    if as_json:
        show_json(report)
    else:
        for error in report["errors"]:
            print(f"{file}:{error['line']}: {error['message']}")
        unlisted = report["num_errors"] - len(report["errors"])
        more = f" ({unlisted} not listed)" if unlisted else ""
        print(f"{file}: {report['rows']} rows, format {report['format']}, {report['num_errors']} errors{more}")
        if report.get("tokens"):
            print(f"tokens: {report['tokens']}")
    if not report["valid"]:
        raise typer.Exit(1)


def _here(file: Path) -> dict[str, Any]:
    with sentences():
        found = validate_file(file)
    errors = [{"line": error.line, "message": error.message} for error in found.errors]
    return {
        "valid": found.valid,
        "rows": found.rows,
        "format": found.format,
        "errors": errors,
        "num_errors": found.num_errors,
    }


def _there(file: Path, model: str, server: str, api_key: str | None) -> dict[str, Any]:
    with connected(server, api_key) as client:
        file_id = client.upload(file)["id"]
        try:
            return client.validate(file_id, model=model)
        finally:
            client.delete_file(file_id)
    raise AssertionError("connected() never swallows an error")
