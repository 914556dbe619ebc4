"""What `posttrain train` shows of a run, read from the files in the attempt's folder: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from posttrain_trainer.contract.rundir import AttemptDir, read_json

_SHOWN = ("resume", "validation", "checkpoint", "warning", "epoch")
_LINE_EVERY_S = 15.0


class Screen:
    """The progress of one run on standard error, between `with` and its end.

    Args:
        console: Where to; None = standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description:>8} "), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("start", total=None, facts="")
        self._attempt: AttemptDir | None = None
        self._events = _Lines()
        self._points = _Lines()
        self._point: dict[str, Any] = {}
        self._said: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, attempt: Path) -> None:
        """The run's files will be here."""
        self._attempt = AttemptDir(attempt)
        self._say(f"attempt {self._attempt.number} in {attempt}")

    def look(self) -> None:
        """Show what is new."""
        if self._attempt is None:
            return
        for event in self._events.new(self._attempt.events):
            if event.get("type") in _SHOWN:
                self._say(str(event.get("message")))
        for point in self._points.new(self._attempt.metrics):
            self._point |= {name: value for name, value in point.items() if value is not None}
        beat = read_json(self._attempt.heartbeat) or {}
        phase, step, total = str(beat.get("phase") or "start"), beat.get("step") or 0, beat.get("total_steps")
        facts = _facts(beat, self._point)
        self._bar.update(self._task, description=phase, completed=step, total=total, facts=facts)
        if not self._console.is_terminal:
            self._line("  ".join(part for part in (phase, f"step {step} of {total}" if total else "", facts) if part))

    def _line(self, text: str) -> None:
        before, at = self._said
        if text != before and time.monotonic() - at >= _LINE_EVERY_S:
            self._said = (text, time.monotonic())
            self._say(text)

    def _say(self, text: str) -> None:
        plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        self._console.print(Text(plain), soft_wrap=True)


class _Lines:
    """The JSON lines that a file has got since the last look."""

    def __init__(self) -> None:
        self._offset = 0

    def new(self, path: Path) -> list[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


def _facts(beat: dict[str, Any], point: dict[str, Any]) -> str:
    facts = []
    if "loss" in point:
        facts.append(f"loss {point['loss']:.4f}")
    if "validation_loss" in point:
        facts.append(f"validation {point['validation_loss']:.4f}")
    if beat.get("tokens_per_s"):
        facts.append(f"{beat['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in point:
        facts.append(f"mfu {point['mfu']:.1%}")
    if beat.get("eta_s") is not None and beat.get("step"):
        minutes, seconds = divmod(round(beat["eta_s"]), 60)
        facts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(facts)
