"""In-process wake-ups ("the queue changed"). Losing one costs a poll, never correctness."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


class Hint:
    """A wake-up that several threads may give and one loop waits for."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def give(self) -> None:
        """Wake the loop now, or let its next wait return at once."""
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a hint, at most `timeout_s`; True when one came. The hint is used up."""
        came = self._event.wait(timeout_s)
        self._event.clear()
        return came


@dataclass(frozen=True)
class Hints:
    """One hint for each loop."""

    scheduler: Hint = field(default_factory=Hint)
    supervisor: Hint = field(default_factory=Hint)
    sweeper: Hint = field(default_factory=Hint)
    webhooks: Hint = field(default_factory=Hint)
    validator: Hint = field(default_factory=Hint)
