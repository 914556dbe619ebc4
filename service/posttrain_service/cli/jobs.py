"""`posttrain jobs ...`: submit, list, show, logs, metrics, the verbs, download."""

from __future__ import annotations

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
from posttrain_service.cli.request import read_request, with_settings
from posttrain_service.client import Client

app = typer.Typer(help="Submit jobs and look after them.", no_args_is_help=True)

_EXIT = {"succeeded": 0, "failed": 1, "cancelled": 1}


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
    follow: Annotated[bool, typer.Option("--follow", help="Print the log until the job ends.")] = False,
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
        print(job["job_uuid"])
        if follow:
            _follow(client, job["job_uuid"], {}, {})


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
                (j["job_uuid"], j["name"], j["status"], _step(j), _loss(j), j["model"], j["created_at"][:19])
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
        rows += [("step", _step(job)), ("loss", _loss(job))]
        rows += [("checkpoint", f"{c['id']} ({c['kind']}, {c['size_bytes']} bytes)") for c in job["checkpoints"]]
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
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Print a job's log."""
    with connected(server, key_file) as client:
        asked: dict[str, Any] = {"source": source, "attempt": attempt}
        asked = {name: value for name, value in asked.items() if value is not None}
        last = {} if tail is None else {"tail": tail}
        if follow:
            _follow(client, job_uuid, asked, last)
        _write(client.logs(job_uuid, **asked, **last))


@app.command()
def metrics(
    job_uuid: JobArgument,
    names: Annotated[
        str, typer.Option(help="Values to show, separated by commas.")
    ] = "epoch,loss,learning_rate,grad_norm,tokens_per_s",
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Print a job's metrics by step."""
    with connected(server, key_file) as client:
        points = client.metrics(job_uuid, names=names)
        if as_json:
            show_json(points)
            return
        columns = ["step", *(name.strip() for name in names.split(",") if name.strip())]
        show_table(columns, ([point.get(name) for name in columns] for point in points))


def _verb(name: Literal["cancel", "pause", "resume", "retry"], sentence: str) -> None:
    def run(job_uuid: JobArgument, server: ServerOption = DEFAULT_SERVER, key_file: KeyFileOption = None) -> None:
        with connected(server, key_file) as client:
            job = getattr(client, name)(job_uuid)
            print(job["status"])

    app.command(name, help=sentence)(run)


_verb("cancel", "Stop a job for good.")
_verb("pause", "Let a job save a checkpoint and stop.")
_verb("resume", "Queue a paused job again.")
_verb("retry", "Start a new attempt of a job that failed or was cancelled.")


@app.command()
def delete(job_uuid: JobArgument, server: ServerOption = DEFAULT_SERVER, key_file: KeyFileOption = None) -> None:
    """Remove an ended job with its files."""
    with connected(server, key_file) as client:
        client.delete_job(job_uuid)


@app.command()
def download(
    job_uuid: JobArgument,
    target: Annotated[
        Path | None, typer.Option("--to", help="File to write; <job>-<checkpoint>.tar unless told.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="E.g. step-000100; the newest unless told.")] = None,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Download a checkpoint as a tar."""
    with connected(server, key_file) as client:
        chosen = checkpoint or _newest(client, job_uuid)
        path = target or Path(f"{job_uuid}-{chosen}.tar")
        print(client.download_checkpoint(job_uuid, chosen, path))


def _newest(client: Client, job_uuid: str) -> str:
    found = client.checkpoints(job_uuid)
    if not found:
        raise FileNotFoundError(f"job {job_uuid} has no complete checkpoint yet")
    return str(found[-1]["id"])


def _follow(client: Client, job_uuid: str, asked: dict[str, Any], last: dict[str, int]) -> None:
    """Print the log as it is written, from its last lines where told so; the exit code says how the job ended."""
    after = None
    if last and client.job(job_uuid)["attempt"]:
        piece = client.log_piece(job_uuid, **asked, **last)
        _write(piece["text"])
        after, asked = f"{piece['attempt']}:{piece['next_offset']}", {**asked, "source": piece["source"]}
    for event in client.stream(job_uuid, "logs", after=after, **asked):
        if event.event == "log":
            _write(event.data["text"])
        elif event.event == "end":
            say(f"job {job_uuid}: {event.data['status']} ({event.data['reason']})")
            raise typer.Exit(_EXIT.get(event.data["status"], 0))


def _write(text: str) -> None:
    """Log text to standard output: bytes as the server gave them, whatever the terminal's encoding."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def _step(job: dict[str, Any]) -> str:
    progress = job["progress"] or {}
    if progress.get("step") is None:
        return ""
    return f"{progress['step']}/{progress.get('total_steps') or '?'}"


def _loss(job: dict[str, Any]) -> str:
    loss = (job["metrics"] or {}).get("loss")
    return "" if loss is None else f"{loss:.4f}"
