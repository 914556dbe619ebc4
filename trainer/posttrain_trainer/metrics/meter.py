"""Measuring one optimizer step: sums over micro-batches and ranks, and where the time went.

Sums stay on the device until the step ends, and cross ranks once a step, together with the flags the ranks agree on.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from posttrain_trainer.dist import World

_RECENT = 20


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks and micro-batches of a step (or of a validation)."""

    loss: float
    """Mean loss over supervised tokens; may be NaN or infinite."""
    accuracy: float
    """Share of supervised tokens guessed right."""
    flags: tuple[float, ...]
    """Sum over the ranks of each flag handed in."""
    extra: tuple[float, ...] = ()
    """Means of the objective's further metrics."""


class Sums:
    """Running sums of loss, right guesses and further metrics, kept on the device.

    Args:
        device: Where they are.
        num_extra: How many further metrics there are.
    """

    def __init__(self, device: torch.device, num_extra: int = 0) -> None:
        self._extra = torch.zeros(num_extra, dtype=torch.float32, device=device)
        self._loss = torch.zeros((), dtype=torch.float32, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss_sum: Tensor, num_correct: Tensor, extra: Tensor | None = None) -> None:
        """Add one micro-batch: the loss summed over what it counts (scalar), its right guesses (scalar), further sums [K]."""
        if extra is not None:
            self._extra += extra.detach()
        self._loss += loss_sum.detach()
        self._correct += num_correct.detach()

    def over_ranks(self, world: World, num_supervised: float, flags: Sequence[float] = ()) -> Totals:
        """One reduction over all ranks, which all call it.

        Args:
            world: All ranks.
            num_supervised: Supervised tokens (or pairs) of all ranks, at least 1.
            flags: Further numbers to sum.
        """
        mine = [float(self._loss.item()), float(self._correct.item()), *self._extra.tolist(), *flags]
        loss, correct, *rest = world.sum(mine)
        extra = tuple(value / num_supervised for value in rest[: len(self._extra)])
        return Totals(loss / num_supervised, correct / num_supervised, tuple(rest[len(self._extra) :]), extra)


class EpochMeans:
    """What an epoch came to: means over its steps, those that this attempt made; skipped steps are only counted."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._loss = self._accuracy = self._count = self._seconds = 0.0
        self._steps = self._skipped = self._tokens = 0

    def add(self, totals: Totals, *, count: float, tokens: int, seconds: float, applied: bool) -> None:
        """Add a step.

        Args:
            totals: Its loss and accuracy, means over `count`.
            count: Supervised tokens (or pairs) of all ranks: the weight of the step.
            tokens: Tokens of all ranks.
            seconds: How long it took.
            applied: Whether it changed the weights; one that was skipped has no loss to speak of.
        """
        self._steps += 1
        self._tokens += tokens
        self._seconds += seconds
        if not applied:
            self._skipped += 1
            return
        self._count += count
        self._loss += totals.loss * count
        self._accuracy += totals.accuracy * count

    def take(self) -> dict[str, float]:
        """The means since the last call, by name: steps, tokens, tokens_per_s, seconds; loss, accuracy; skipped if any."""
        found: dict[str, float] = {"steps": self._steps, "tokens": self._tokens, "seconds": round(self._seconds, 3)}
        if self._seconds > 0:
            found["tokens_per_s"] = self._tokens / self._seconds
        if self._count > 0:
            found |= {"loss": self._loss / self._count, "accuracy": self._accuracy / self._count}
        if self._skipped:
            found["skipped"] = self._skipped
        self._begin()
        return found


class DeviceEvent(Protocol):
    """A mark in the work of a device, as torch.cuda.Event is one."""

    def record(self) -> None:
        """Note the time when the device comes past here."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to `end`, after both are past."""


def device_marks(kind: str) -> Callable[[], DeviceEvent] | None:
    """What makes timed events for a kind of device; None where torch has none."""
    if kind not in ("cuda", "xpu"):
        return None
    made: Any = getattr(torch, kind).Event
    return lambda: made(enable_timing=True)


class Stopwatch:
    """Time of the parts of a step, in seconds.

    Where the device works in step with the host, that is the host's time. Elsewhere forward and backward only queue
    work: the device itself notes when it comes past the marks between them, and is asked once the step is over.

    Args:
        in_step_with_host: Whether work is done when its call returns.
        mark: Makes a timed event of a device that isn't; None = such a device has none, and only `data` is told.
    """

    def __init__(self, *, in_step_with_host: bool, mark: Callable[[], DeviceEvent] | None = None) -> None:
        self._tells_parts = in_step_with_host
        self._mark = None if in_step_with_host else mark
        self._marked: list[tuple[str, DeviceEvent, DeviceEvent]] = []
        self._parts: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the with-block to a part."""
        started = time.perf_counter()
        begin = None
        if self._mark is not None and name != "data":  # batches are made by the host
            begin = self._mark()
            begin.record()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - started
            if begin is not None and self._mark is not None:
                end = self._mark()
                end.record()
                self._marked.append((name, begin, end))

    def parts(self) -> dict[str, float]:
        """Seconds by part, once the device is done; data always, the others where they can be told."""
        told = {name: s for name, s in self._parts.items() if self._tells_parts or name == "data"}
        for name, begin, end in self._marked:
            told[name] = told.get(name, 0.0) + begin.elapsed_time(end) / 1000
        return told

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started


class Pace:
    """Speed of the last steps, for the progress bar."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def add(self, step_time_s: float, num_tokens: int) -> None:
        """Note one step."""
        self._steps.append((step_time_s, num_tokens))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second over the last steps; None before the first."""
        seconds = sum(s for s, _ in self._steps)
        return sum(n for _, n in self._steps) / seconds if seconds > 0 else None

    def eta_s(self, steps_left: int) -> float | None:
        """Estimated seconds for so many more steps; None before the first."""
        return steps_left * sum(s for s, _ in self._steps) / len(self._steps) if self._steps else None


def finite(value: float) -> float | None:
    """The value, or None when it is NaN or infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None
