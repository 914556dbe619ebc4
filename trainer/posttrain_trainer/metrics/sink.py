"""Where metrics points go: the MetricSink protocol, and the fan-out that keeps a failing sink from stopping a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.events import MetricsPoint, Tracker

End = Literal["completed", "stopped", "failed"]
"""How the attempt ended, as trackers shall show it; stopped: paused or cancelled."""


class MetricSink(Protocol):
    """Takes one point after the other, then is closed."""

    @property
    def name(self) -> str:
        """The sink's `kind`, for messages."""

    @property
    def url(self) -> str | None:
        """Address of a page that shows the run; None where there is none."""

    def write(self, point: MetricsPoint) -> None:
        """Take one point; whatever is raised makes the fan-out drop this sink for the rest of the run."""

    def close(self, end: End = "completed") -> None:
        """Write out what is buffered; a tracker that knows states of runs is told how this one ended."""


_NOT_NUMBERS = {"v", "attempt", "step", "time", "skipped"}


def numbers(point: MetricsPoint) -> dict[str, float]:
    """What a point measured, by `train/<field>` or `validation/<rest of the field>`: what trackers draw."""
    found: dict[str, float] = {}
    for name, value in point.model_dump(exclude_none=True).items():
        if name not in _NOT_NUMBERS:
            found[name.replace("validation_", "validation/", 1) if name.startswith("validation_") else f"train/{name}"] = value
    return found


def open_sink(kind: str, make: Callable[[], MetricSink], warn: Callable[[str], None]) -> MetricSink | None:
    """A sink, or None after a warning when it cannot be opened: a tracker that is down must not cost a run.

    Args:
        kind: The sink's `kind`, for the message.
        make: Opens it.
        warn: Called with one sentence when that fails.

    Raises:
        InvalidArguments: Its package is not installed, which waiting does not mend.
    """
    try:
        return make()
    except InvalidArguments:
        raise
    except Exception as error:  # noqa: BLE001  the edge to third-party code
        warn(f"the {kind} logger could not be opened ({type(error).__name__}: {error}); the run goes on without it")
        return None


class FanOut:
    """Gives each point to all sinks; one that fails is told about once, then left out, and training goes on.

    Args:
        sinks: Where points go.
        warn: Called with one sentence for each sink that failed.
    """

    def __init__(self, sinks: Sequence[MetricSink], warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn

    @property
    def trackers(self) -> list[Tracker]:
        """The pages of those sinks that have one."""
        return [Tracker(kind=sink.name, url=sink.url) for sink in self._sinks if sink.url is not None]

    def write(self, point: MetricsPoint) -> None:
        """Give a point to every sink that has not failed yet."""
        for sink in list(self._sinks):
            self._guard(sink, lambda sink=sink: sink.write(point), "its points from here on are missing")  # type: ignore[misc]

    def close(self, end: End = "completed") -> None:
        """Close every sink that has not failed yet."""
        for sink in list(self._sinks):
            self._guard(sink, lambda sink=sink: sink.close(end), "its last points may be missing")  # type: ignore[misc]
        self._sinks.clear()

    def _guard(self, sink: MetricSink, act: Callable[[], None], consequence: str) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  the edge to third-party code: a broken logger must not cost a run
            self._sinks.remove(sink)
            reason = f"{type(error).__name__}: {error}"
            self._warn(f"the {sink.name} logger failed and was switched off at this step ({reason}); {consequence}")
