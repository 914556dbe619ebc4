"""The command `posttrain`: wires the groups together."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer

from posttrain_service import __version__
from posttrain_service.app import openapi_yaml
from posttrain_service.cli import config, data, db, jobs, keys, models, serve
from posttrain_service.cli.common import DEFAULT_SERVER, EXIT_CODES, KeyFileOption, ServerOption, connected, show_json
from posttrain_service.cli.demo import demo
from posttrain_service.cli.doctor import doctor
from posttrain_service.cli.train import train
from posttrain_trainer.contract import CONTRACT_VERSION

app = typer.Typer(
    name="posttrain",
    help="Fine-tuning jobs over HTTP.",
    no_args_is_help=True,
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # help is plain text; brackets in it are no markup
    pretty_exceptions_enable=False,
)
app.add_typer(jobs.app, name="jobs")
app.add_typer(models.app, name="models")
app.add_typer(data.app, name="data")
app.add_typer(db.app, name="db")
app.add_typer(keys.app, name="keys")
app.command("serve")(serve.serve)
app.add_typer(config.app, name="config")
app.command("train")(train)
app.command("demo")(demo)
app.command("doctor")(doctor)


@app.command()
def openapi(
    to: Annotated[Path | None, typer.Option("--to", help="File to write; standard output unless told.")] = None,
) -> None:
    """Print the description of the HTTP API."""
    text = openapi_yaml()
    if to is None:
        print(text, end="")
    else:
        to.write_text(text, encoding="utf-8")


@app.command()
def version(
    remote: Annotated[bool, typer.Option("--remote", help="Ask the server for its versions too.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Print versions."""
    found: dict[str, object] = {
        "version": __version__,
        "contract": CONTRACT_VERSION,
        "python": platform.python_version(),
    }
    if remote:
        with connected(server, key_file) as client:
            found["server"] = client.version()
    show_json(found)


def main() -> None:
    """Entry point."""
    app()
