"""Looking on while a job runs: its log, its events, or its state; also over a restart of the server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from posttrain_service.cli.common import say, show_json_line
from posttrain_service.client import ApiError, Client, ServerGone
from posttrain_service.client.base import PATIENCE_S, Patience

RetryOption = Annotated[
    float, typer.Option("--retry-for", min=0, help="Seconds in which a server that went away must be back, to go on where it was.")
]
RETRY_FOR_S = PATIENCE_S
ENDED = {"succeeded": 0, "failed": 1, "cancelled": 1}
"""Exit code for each state in which a job has ended."""


def follow_log(client: Client, job_uuid: str, asked: dict[str, Any], last: dict[str, int], retry_for_s: float) -> None:
    """Print the log as it is written, from its last lines where told so; the exit code says how the job ended."""
    after = None
    if last and client.job(job_uuid)["attempt"]:
        piece = client.log_piece(job_uuid, **asked, **last)
        write(piece["text"])
        after, asked = f"{piece['attempt']}:{piece['next_offset']}", {**asked, "source": piece["source"]}
    for event in client.follow(job_uuid, "logs", after=after, patience_s=retry_for_s, on_gone=tell_loss, **asked):
        if event.event == "log":
            write(event.data["text"])
        elif event.event == "end":
            end(job_uuid, event.data)


def follow_events(client: Client, job_uuid: str, retry_for_s: float, *, as_json: bool) -> None:
    """Print events as they happen; the exit code says how the job ended."""
    for event in client.follow(job_uuid, "events", patience_s=retry_for_s, on_gone=tell_loss):
        if event.event == "event" and as_json:
            show_json_line(event.data)
        elif event.event == "event":
            write(f"{event_line(event.data)}\n")
        elif event.event == "end":
            end(job_uuid, event.data)


def watch(client: Client, job_uuid: str, every_s: float, retry_for_s: float, *, as_json: bool) -> None:
    """Show state and progress until the job has ended: one picture on a terminal, else a line for each change."""
    if sys.stdout.isatty() and not as_json:
        with Live(console=Console(highlight=False), refresh_per_second=4) as live:
            for job in _changes(client, job_uuid, every_s, retry_for_s):
                live.update(_picture(job))
    else:
        for job in _changes(client, job_uuid, every_s, retry_for_s):
            if as_json:
                show_json_line(job)
            else:
                write(f"{_line(job)}\n")
    end(job_uuid, job)


def event_line(event: dict[str, Any]) -> str:
    """One event on one line."""
    text = f"{event['created_at'][:19]}Z {event['level']:<5} {event['type']}: {event['message']}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def tell_loss(error: ServerGone) -> None:
    """Say that the server went away."""
    say(f"note: {error}; waiting for it to come back")


def end(job_uuid: str, how: dict[str, Any]) -> None:
    """Say how the job ended, and exit accordingly."""
    say(f"job {job_uuid}: {how['status']} ({how['reason']})")
    raise typer.Exit(ENDED.get(how["status"], 0))


def write(text: str) -> None:
    """Text to standard output: bytes as the server gave them, whatever the terminal's encoding."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def step_of(job: dict[str, Any]) -> str:
    """`10/100`, or nothing before the first step."""
    progress = job["progress"] or {}
    if progress.get("step") is None:
        return ""
    return f"{progress['step']}/{progress.get('total_steps') or '?'}"


def loss_of(job: dict[str, Any]) -> str:
    """The newest loss, or nothing."""
    loss = (job["metrics"] or {}).get("loss")
    return "" if loss is None else f"{loss:.4f}"


def _changes(client: Client, job_uuid: str, every_s: float, retry_for_s: float) -> Iterator[dict[str, Any]]:
    """The job each time that its state or progress is another one; the last one has ended."""
    patience = Patience(retry_for_s, tell_loss)
    seen: tuple[Any, ...] | None = None
    while True:
        try:
            job = client.job(job_uuid)
        except (ServerGone, ApiError) as error:
            time.sleep(patience.lost(error))
            continue
        patience.heard()
        now = job["status"], job["attempt"], step_of(job), job["queue_position"]
        if now != seen:
            seen = now
            yield job
        if job["status"] in ENDED:
            return
        time.sleep(every_s)


def _line(job: dict[str, Any]) -> str:
    parts = {"step": step_of(job), "loss": loss_of(job), "eta": _eta(job), "queue": job["queue_position"]}
    return " ".join([str(job["status"]), *(f"{name} {value}" for name, value in parts.items() if value not in (None, ""))])


def _eta(job: dict[str, Any]) -> str:
    seconds = (job["progress"] or {}).get("eta_s")
    if seconds is None or job["status"] in ENDED:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{rest:02d}s"


def _picture(job: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    percent = (job["progress"] or {}).get("percent") or 0.0
    done = int(percent / 100 * 30)
    rows = [("job", job["name"] or job["job_uuid"]), ("status", job["status"]), ("step", step_of(job))]
    rows += [("", f"[{'#' * done}{'.' * (30 - done)}] {percent:.0f} %"), ("loss", loss_of(job)), ("left", _eta(job))]
    for name, value in rows:
        if value:
            table.add_row(Text(name), Text(str(value)))
    return table
