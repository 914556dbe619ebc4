"""`posttrain jobs ...`: submit, list, show, watch, logs, metrics, events, the verbs, download."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from posttrain_service.cli.common import (
    DEFAULT_SERVER,
    JobArgument,
    JsonOption,
    KeyFileOption,
    ServerOption,
    connected,
    say,
    show_json,
    show_table,
)
from posttrain_service.cli.plot import plot
from posttrain_service.cli.request import read_request, with_settings
from posttrain_service.cli.tensorboard import tensorboard
from posttrain_service.cli.watching import (
    RETRY_FOR_S,
    RetryOption,
    event_line,
    follow_events,
    follow_log,
    loss_of,
    step_of,
    write,
)
from posttrain_service.cli.watching import watch as look_on
from posttrain_service.client import Client

_NAMES = "epoch,loss,learning_rate,grad_norm,tokens_per_s"
_PLOTTED = 2000
"""Most points of a curve; the server thins out the rest and keeps lows and highs."""

app = typer.Typer(help="Submit jobs and look after them.", no_args_is_help=True)


@app.command()
def submit(
    file: Annotated[
        Path, typer.Argument(help="YAML or JSON: a job request, or a train profile.", exists=True, dir_okay=False)
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set one value, e.g. training.num_epochs=3.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Upload this file and train on it.", exists=True, dir_okay=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print the log until the job ends.")] = False,
    retry_for: RetryOption = RETRY_FOR_S,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Submit a job; prints its id."""
    with connected(server, key_file) as client:
        read = read_request(file)
        for note in read.notes:
            say(f"note: {note}")
        request = with_settings(read.request, settings or ())
        for name, path in {**read.uploads, **({} if data is None else {"dataset": data})}.items():
            say(f"uploading {path.name}")
            request[name] = client.upload(path)["id"]
        if dry_run:
            show_json(client.plan(request))
            return
        job = client.create_job(request)
        if as_json:
            show_json(job)
        else:
            print(job["job_uuid"])
        if follow:
            follow_log(client, job["job_uuid"], {}, {}, retry_for)


@app.command("list")
def list_(
    status: Annotated[list[str] | None, typer.Option(help="Only jobs in this state; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs to show.")] = 20,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """List jobs, newest first."""
    with connected(server, key_file) as client:
        query: dict[str, Any] = {"limit": min(limit, 100)} | ({"status": status} if status else {})
        found = [job for job, _ in zip(client.jobs(**query), range(limit), strict=False)]
        if as_json:
            show_json(found)
            return
        show_table(
            ("JOB_UUID", "NAME", "STATUS", "STEP", "LOSS", "MODEL", "CREATED"),
            (
                (j["job_uuid"], j["name"], j["status"], step_of(j), loss_of(j), j["model"], j["created_at"][:19])
                for j in found
            ),
        )


@app.command()
def show(
    job_uuid: JobArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER, key_file: KeyFileOption = None
) -> None:
    """Show one job."""
    with connected(server, key_file) as client:
        job = client.job(job_uuid)
        if as_json:
            show_json(job)
            return
        names = ("job_uuid", "name", "status", "reason", "model", "method", "attempt", "queue_position", "fine_tuned_model")
        times = ("created_at", "started_at", "completed_at", "expires_at")
        rows = [(name, job[name]) for name in (*names, *times) if job[name] is not None]
        rows += [("step", step_of(job)), ("loss", loss_of(job))]
        rows += [("checkpoint", f"{c['id']} ({c['kind']}, {c['size_bytes']} bytes)") for c in job["checkpoints"]]
        rows += [(one["kind"], one["url"]) for one in job.get("trackers", [])]  # a server of an earlier version has none
        rows += [("warning", text) for text in job["warnings"]]
        if job["error"] is not None:
            rows += [("error", job["error"]["message"]), ("log_tail", job["error"]["log_tail"])]
        show_table(("", ""), [(name, value) for name, value in rows if value not in (None, "")])


@app.command()
def logs(
    job_uuid: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last so many lines.")] = None,
    source: Annotated[str | None, typer.Option(help="torchrun, rank-0, ...")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Attempt; the newest unless told.")] = None,
    retry_for: RetryOption = RETRY_FOR_S,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Print a job's log."""
    with connected(server, key_file) as client:
        asked: dict[str, Any] = {"source": source, "attempt": attempt}
        asked = {name: value for name, value in asked.items() if value is not None}
        last = {} if tail is None else {"tail": tail}
        if follow:
            if as_json:
                raise typer.BadParameter("a log that is followed is text; leave --json out", param_hint="--json")
            follow_log(client, job_uuid, asked, last, retry_for)
        elif as_json:
            show_json(client.log_piece(job_uuid, **asked, **last))
        else:
            write(client.logs(job_uuid, **asked, **last))


@app.command()
def events(
    job_uuid: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    retry_for: RetryOption = RETRY_FOR_S,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Print what happened to a job; with --follow and --json an object a line."""
    with connected(server, key_file) as client:
        if follow:
            follow_events(client, job_uuid, retry_for, as_json=as_json)
        found = list(client.events(job_uuid))
        if as_json:
            show_json(found)
            return
        for event in found:
            write(f"{event_line(event)}\n")


@app.command()
def watch(
    job_uuid: JobArgument,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 2.0,
    retry_for: RetryOption = RETRY_FOR_S,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Show a job's state and progress until it ends; when piped, a line for each change (with --json: the job)."""
    with connected(server, key_file) as client:
        look_on(client, job_uuid, every, retry_for, as_json=as_json)


@app.command()
def metrics(
    job_uuid: JobArgument,
    names: Annotated[
        str | None, typer.Option(help=f"Values to show, separated by commas; unless told {_NAMES}, and for --plot loss.")
    ] = None,
    as_plot: Annotated[bool, typer.Option("--plot", help="Draw the curves.")] = False,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Print a job's metrics by step."""
    with connected(server, key_file) as client:
        chosen = [name.strip() for name in (names or ("loss" if as_plot else _NAMES)).split(",") if name.strip()]
        points = client.metrics(job_uuid, names=",".join(chosen), **({"max_points": _PLOTTED} if as_plot else {}))
        if as_json:
            show_json(points)
            return
        if as_plot:
            _draw(points, chosen)
            return
        columns = ["step", *chosen]
        show_table(columns, ([_short(point.get(name)) for name in columns] for point in points))


def _short(value: Any) -> Any:
    """A measured value with as many digits as mean something; --json has them all."""
    return f"{value:.5g}" if isinstance(value, float) else value


def _verb(name: Literal["cancel", "pause", "resume", "retry"], sentence: str) -> None:
    def run(
        job_uuid: JobArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER, key_file: KeyFileOption = None
    ) -> None:
        with connected(server, key_file) as client:
            job = getattr(client, name)(job_uuid)
            if as_json:
                show_json(job)
            else:
                print(job["status"])

    app.command(name, help=sentence)(run)


_verb("cancel", "Stop a job for good.")
_verb("pause", "Let a job save a checkpoint and stop.")
_verb("resume", "Queue a paused job again.")
_verb("retry", "Start a new attempt of a job that failed or was cancelled.")


@app.command("rm")
@app.command("delete", hidden=True)
def remove(
    job_uuid: JobArgument, as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER, key_file: KeyFileOption = None
) -> None:
    """Remove an ended job with its files."""
    with connected(server, key_file) as client:
        client.delete_job(job_uuid)
        if as_json:
            show_json({"job_uuid": job_uuid, "deleted": True})


@app.command()
def download(
    job_uuid: JobArgument,
    target: Annotated[
        Path | None, typer.Option("--to", help="File to write; <job>-<checkpoint>.tar unless told.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="E.g. step-000100; the newest unless told.")] = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Download a checkpoint as a tar."""
    with connected(server, key_file) as client:
        chosen = checkpoint or _newest(client, job_uuid)
        path = target or Path(f"{job_uuid}-{chosen}.tar")
        saved = client.download_checkpoint(job_uuid, chosen, path)
        if as_json:
            show_json({"job_uuid": job_uuid, "checkpoint": chosen, "path": str(saved), "size_bytes": saved.stat().st_size})
        else:
            print(saved)


app.command("tensorboard")(tensorboard)


def _newest(client: Client, job_uuid: str) -> str:
    found = client.checkpoints(job_uuid)
    if not found:
        raise FileNotFoundError(f"job {job_uuid} has no complete checkpoint yet")
    return str(found[-1]["id"])


def _draw(points: list[dict[str, Any]], names: list[str]) -> None:
    """The curves one below the other, as wide as the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    braille = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    for name in names:
        values = [(point["step"], point[name]) for point in points if isinstance(point.get(name), int | float)]
        lines = plot(values, width=min(width, 120), braille=braille)
        write("\n".join([f"{name} by step", *lines, ""]) if lines else f"{name}: no value yet\n")
