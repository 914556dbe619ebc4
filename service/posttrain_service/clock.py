"""What time it is: seconds since the epoch, UTC. Everything that judges by time takes a Clock or a `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time; tests pass one that they move themselves."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        ...


class SystemClock:
    """The host's clock."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()


class ManualClock:
    """A clock that stands still until it is moved; for tests and for asking "what would happen at"."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        """The time it was set to."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` and return the new time."""
        assert seconds >= 0, "time does not run backwards"
        self._now += seconds
        return self._now
