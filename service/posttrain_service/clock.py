"""What time it is: seconds since the epoch, UTC. Everything that judges by time takes a Clock or a `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time; tests pass one that they move themselves."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; nobody sets this one, and it stands while the host sleeps."""
        ...


class SystemClock:
    """The host's clock."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()

    def monotonic(self) -> float:
        """The host's monotonic clock."""
        return time.monotonic()


class Jumps:
    """Notices that the clock was set, or that the host slept, by the clock that isn't touched by either."""

    def __init__(self, clock: Clock, *, least_s: float = 5.0) -> None:
        self._clock = clock
        self._least_s = least_s
        self._offset = self._now()

    def since_last(self) -> float:
        """Seconds that the clock has jumped (negative = back) since the last call; 0.0 for less than `least_s`."""
        offset = self._now()
        jump = offset - self._offset
        if abs(jump) < self._least_s:
            return 0.0  # not forgotten: a clock that is corrected in small steps adds up
        self._offset = offset
        return jump

    def _now(self) -> float:
        return self._clock.now() - self._clock.monotonic()


class ManualClock:
    """A clock that stands still until it is moved; for tests and for asking "what would happen at"."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0

    def now(self) -> float:
        """The time it was set to."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` and return the new time."""
        assert seconds >= 0, "time does not run backwards"
        self._now += seconds
        self._monotonic += seconds
        return self._now

    def monotonic(self) -> float:
        """How far it has been moved."""
        return self._monotonic

    def jump(self, seconds: float) -> None:
        """Set it forward, or back by a negative number, without any time passing."""
        self._now += seconds
