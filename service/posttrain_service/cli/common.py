"""What the commands share: where the server is, how errors end a command, how JSON and tables are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain_service.cli.apikey import KEY_FILE_VARIABLE, read_key
from posttrain_service.client import ApiError, Client, ServerGone
from posttrain_service.errors import ServiceError

EXIT_CODES = (
    "Exit codes: 0 done; 1 refused or failed, also a job that was followed and failed or was cancelled; 2 wrong usage; "
    "3 the server can't be reached or went away, while its jobs go on."
)
EXIT_GONE = 3
DEFAULT_SERVER = "http://127.0.0.1:8484"

ServerOption = Annotated[str, typer.Option("--server", envvar="POSTTRAIN_SERVER", help="Address of the server.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", envvar=KEY_FILE_VARIABLE, show_default=False,
        help="File with the API key, readable by you alone; without it POSTTRAIN_API_KEY, else api-key in the settings folder.",
    ),
]  # fmt: skip
JsonOption = Annotated[bool, typer.Option("--json", help="Print the server's JSON.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB_UUID", help="The job's id.")]


@contextmanager
def connected(server: str, key_file: Path | None) -> Iterator[Client]:
    """A client; an error that the user can do something about ends the command with one sentence."""
    with sentences(), Client(server, api_key=read_key(key_file)) as client:
        yield client


@contextmanager
def sentences() -> Iterator[None]:
    """Turn the errors that are meant for people into a line on standard error and an exit code."""
    try:
        yield
    except ApiError as error:
        fail(error.message, error.errors)
    except ServiceError as error:
        fail(error.message, error.errors)
    except ServerGone as error:
        fail(str(error), code=EXIT_GONE)
    except OSError as error:
        fail(str(error))


def fail(message: str, faults: Sequence[dict[str, Any]] = (), code: int = 1) -> None:
    """Say what is wrong, list the single faults, and exit."""
    say(f"error: {message}")
    for fault in faults[:20]:
        where = f"line {fault['line']}: " if fault.get("line") else ""
        where += f"{fault['loc']}: " if fault.get("loc") else ""
        say(f"  {where}{fault.get('message')}")
    if len(faults) > 20:
        say(f"  ... and {len(faults) - 20} more")
    raise typer.Exit(code)


def say(text: str) -> None:
    """A line for people on standard error, with control characters escaped."""
    print("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), file=sys.stderr)


def show_json(value: Any) -> None:
    """JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show_json_line(value: Any) -> None:
    """JSON on one line of standard output, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table on standard output; cells are plain text, never markup."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for name in columns:
        table.add_column(name, overflow="fold")  # an id that is cut is of no use
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)
