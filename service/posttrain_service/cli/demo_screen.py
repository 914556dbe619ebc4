"""What the demo shows: lines of facts, a progress bar, a table of answers, and where to go from there."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from posttrain_service.client import Client
from posttrain_service.settings import Settings

POLL_S = 0.5
PLAIN_EVERY_S = 15.0
ENDED = ("succeeded", "failed", "cancelled", "paused")


class DemoError(Exception):
    """Something that the demo needs cannot be had; the message is one sentence for people."""


def told(console: Console, what: str, text: str) -> None:
    """One line of facts."""
    console.print(f"[bold]{what:>8}[/bold]  {escape(text)}", soft_wrap=True)


@contextlib.contextmanager
def busy(console: Console, what: str, text: str) -> Iterator[None]:
    """Say what is being waited for: a spinner on a terminal, a line where the output is piped."""
    if not console.is_terminal:
        told(console, what, text)
        yield
        return
    with console.status(f"{what}: {text}"):
        yield


def follow(console: Console, client: Client, job: dict[str, Any], address: str) -> dict[str, Any]:
    """Show the job's progress until it ends; returns it as it ended.

    Raises:
        DemoError: It ended otherwise than by success.
    """
    if job["status"] not in ENDED:
        job = _bar(console, client, job) if console.is_terminal else _lines(console, client, job)
    if job["status"] != "succeeded":
        error = job["error"] or {"message": job["reason"]}
        raise DemoError(
            f"job {job['job_uuid']} is {job['status']}: {error['message']} "
            f"(its log: {own_command()} jobs logs {job['job_uuid']} --server {address})"
        )
    told(console, "trained", _summary(job, client.metrics(job["job_uuid"])))
    return job


def _bar(console: Console, client: Client, job: dict[str, Any]) -> dict[str, Any]:
    columns = (
        TextColumn("[bold]{task.description:>8}[/bold] "), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(job["status"], total=None, facts="")
        while job["status"] not in ENDED:
            now = job["progress"] or {}
            phase = now.get("phase") if job["status"] == "running" else job["status"]
            progress.update(
                task, description=phase or job["status"], completed=now.get("step") or 0, total=now.get("total_steps"), facts=_facts(job)
            )  # fmt: skip
            time.sleep(POLL_S)
            job = client.job(job["job_uuid"])
    return job


def _lines(console: Console, client: Client, job: dict[str, Any]) -> dict[str, Any]:
    shown = ""
    last = 0.0
    while job["status"] not in ENDED:
        now = job["progress"] or {}
        steps = f"step {now['step']} of {now['total_steps']}" if now.get("step") else now.get("phase") or ""
        text = "  ".join(part for part in (job["status"], steps, _facts(job)) if part)
        if text != shown and time.monotonic() - last >= PLAIN_EVERY_S:
            told(console, "job", text)
            shown, last = text, time.monotonic()
        time.sleep(POLL_S)
        job = client.job(job["job_uuid"])
    return job


def _facts(job: dict[str, Any]) -> str:
    now, point = job["progress"] or {}, job["metrics"] or {}
    facts = []
    if point.get("loss") is not None:
        facts.append(f"loss {point['loss']:.3f}")
    if now.get("tokens_per_s"):
        facts.append(f"{now['tokens_per_s']:.0f} tokens/s")
    if now.get("eta_s") is not None:
        minutes, seconds = divmod(round(now["eta_s"]), 60)
        facts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(facts)


def _summary(job: dict[str, Any], points: Sequence[dict[str, Any]]) -> str:
    now, point = job["progress"] or {}, job["metrics"] or {}
    parts = [f"{now['step']} steps"] if now.get("step") else []
    if now.get("tokens_seen"):
        parts.append(f"{now['tokens_seen']:,} tokens")
    first = next((point["loss"] for point in points if point.get("loss") is not None), None)
    if first is not None:
        parts.append(f"loss {first:.3f} at first, {point['loss']:.3f} at last")
    return ", ".join(parts) or "done"


def compare(
    console: Console, questions: Sequence[tuple[str, str]], before: Sequence[str], after: Sequence[str]
) -> None:
    """A table of the answers, and how many of them hold the fact that was to be learned."""
    table = Table(show_lines=True, title="Questions in words that the data does not have", title_justify="left")
    for title in ("question", "before", "after"):
        table.add_column(title, ratio=1, overflow="fold")
    for (question, _), old, new in zip(questions, before, after, strict=True):
        table.add_row(escape(question), escape(old), escape(new))
    console.print(table)
    facts = [fact.lower() for _, fact in questions]
    known = [sum(fact in text.lower() for fact, text in zip(facts, texts, strict=True)) for texts in (before, after)]
    console.print(f"Right answers: {known[0]} of {len(facts)} before, {known[1]} of {len(facts)} after.")


def own_command() -> str:
    """How `posttrain` is called from here: by its path where the shell would not find this one."""
    script = Path(sys.executable).parent / "posttrain"
    found = shutil.which("posttrain")
    if not script.exists() or (found is not None and Path(found).resolve() == script.resolve()):
        return "posttrain"
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)


def farewell(
    console: Console, settings: Settings, address: str, job: dict[str, Any], adapter: Path, pid: int | None
) -> None:
    """Where the files are and how to go on."""
    url = f"{address}/post_training/jobs/{job['job_uuid']}"
    stop = f" (stop it: kill {pid})" if pid else ""
    command = own_command()
    lines = [
        f"The service goes on at {address}{stop}; its API: {address}/openapi.json",
        f"The adapter, for peft:   {adapter}",
        f"Models, jobs, database:  {settings.storage_dir}",
        f"The job:                 curl {url}",
        f"In the browser:          {address}/#/jobs/{job['job_uuid']}",
        f"Its metrics:             {command} jobs metrics {job['job_uuid']} --server {address}",
        f"Its log:                 {command} jobs logs {job['job_uuid']} --server {address}",
        "Your own data:           docs/tutorial.md",
    ]
    console.print()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
