"""A loop in a thread of its own: do one round, wait for a hint or the interval, again.

A round that raises is logged and tried again: rounds are level-triggered, so the next one sees the same facts. How
long ago the last round ended well is what health reports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from posttrain_service.logs import log_context
from posttrain_service.work.hints import Hint

log = logging.getLogger(__name__)

MAX_PAUSE_S = 30.0


class Loop:
    """One named loop.

    Args:
        name: For logs, health and the thread.
        step: One round; returns the seconds until it wants the next one, or None for the interval.
        hint: Makes the next round early.
        interval_s: Longest wait between rounds.
        on_round: Told of each round: the loop's name, seconds that it took, whether it raised.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float | None],
        hint: Hint,
        interval_s: float,
        on_round: Callable[[str, float, bool], None] | None = None,
    ) -> None:
        self.name = name
        self.interval_s = interval_s
        self.last_error: str | None = None
        self._step = step
        self._hint = hint
        self._on_round = on_round or (lambda name, seconds, failed: None)
        self._failures = 0
        self._last_good = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; the first round is made at once."""
        self._last_good = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"posttrain-{self.name}", daemon=True)
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Have the thread end after its round; returns at once."""
        self._stop.set()
        self._hint.give()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Have the thread end after its round and wait for it; False when it hasn't ended in time."""
        self.ask_to_stop()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def round(self) -> float:
        """Make one round now, in the calling thread; a failure is logged.

        Returns:
            Seconds until the next round is due; longer after each failure in a row, so that a broken store isn't
            hammered.
        """
        began = time.monotonic()
        with log_context(loop=self.name):
            pause_s = self._round()
        self._on_round(self.name, time.monotonic() - began, self._failures > 0)
        return pause_s

    def _round(self) -> float:
        try:
            wanted_s = self._step()
        except Exception as error:  # the loop is an edge: one bad round must not end supervision
            self._failures += 1
            self.last_error = f"{type(error).__name__}: {error}"
            log.exception("a round of the %s failed (%d in a row)", self.name, self._failures)
            return min(self.interval_s * 2.0 ** min(self._failures - 1, 10), max(self.interval_s, MAX_PAUSE_S))
        self._failures = 0
        self.last_error = None
        self._last_good = time.monotonic()
        return self.interval_s if wanted_s is None else min(wanted_s, self.interval_s)

    def age_s(self) -> float:
        """Seconds since the last round that ended well."""
        return time.monotonic() - self._last_good

    def is_alive(self) -> bool:
        """Whether the thread runs and a round ended well not long ago."""
        running = self._thread is not None and self._thread.is_alive()
        return running and self.age_s() < 10 * self.interval_s + MAX_PAUSE_S

    def _run(self) -> None:
        while not self._stop.is_set():
            pause_s = self.round()
            if self._stop.is_set():
                return
            self._hint.wait(pause_s)
