"""One look for all who look at the same thing at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Asks a blocking function in a thread, and gives its answer to everybody who asks the same again soon.

    Only for answers that may be a little old. A failed look is told to those who share it, and to nobody after them.

    Args:
        look: What is asked, by key.
        fresh_s: How old an answer may be that is given again.
    """

    def __init__(self, look: Callable[[str], T], fresh_s: float) -> None:
        self._look = look
        self._fresh_s = fresh_s
        self._looks: dict[str, tuple[float, asyncio.Task[T]]] = {}

    async def get(self, key: str) -> T:
        """The answer for a key, at most `fresh_s` seconds old when it is returned, but for the time that a look takes."""
        now = time.monotonic()
        began, task = self._looks.get(key, (0.0, None))
        if task is None or now - began > self._fresh_s or _is_useless(task):
            self._forget(now)
            task = asyncio.ensure_future(asyncio.to_thread(self._look, key))
            task.add_done_callback(_heard)
            self._looks[key] = (now, task)
        # One who leaves must not take the look away from the others.
        return await asyncio.shield(task)

    def _forget(self, now: float) -> None:
        for key in [key for key, (began, task) in self._looks.items() if now - began > self._fresh_s and task.done()]:
            del self._looks[key]


def _is_useless(task: asyncio.Task[T]) -> bool:
    """It failed, or is one of another event loop."""
    failed = task.done() and (task.cancelled() or task.exception() is not None)
    return failed or task.get_loop() is not asyncio.get_running_loop()


def _heard(task: asyncio.Task[T]) -> None:
    """An error that everybody had left before it came is no error of the program."""
    if not task.cancelled():
        task.exception()
