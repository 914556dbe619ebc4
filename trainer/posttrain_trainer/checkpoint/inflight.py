"""The one checkpoint that is being written, if any, and the newest that is complete, as the loop knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from posttrain_trainer.checkpoint.background import Saving
from posttrain_trainer.checkpoint.save import Trigger
from posttrain_trainer.contract.events import Manifest


class Tell(Protocol):
    """Takes an event: its type, a sentence, and data."""

    def __call__(self, type_: Literal["checkpoint"], message: str, **data: Any) -> None:
        """Write it down."""


class InFlight:
    """Never more than one checkpoint is being written; whoever begins another waits for it first.

    Args:
        newest: The checkpoint the run goes on from, if any.
        tell: Told when one is complete.
        waits: Called before training stands still to wait for the end of one.
    """

    def __init__(self, newest: Manifest | None, tell: Tell, waits: Callable[[], None]) -> None:
        self.newest = newest
        self._tell = tell
        self._waits = waits
        self._now: tuple[Saving, int, Trigger] | None = None

    def add(self, saving: Saving, step: int, trigger: Trigger) -> None:
        """Take charge of one that has begun."""
        assert self._now is None
        self._now = saving, step, trigger
        if saving.over:
            self.finish()

    @property
    def failed(self) -> bool:
        """Whether one could not be written and `finish` will say why; ranks may learn of it at different steps."""
        return self._now is not None and self._now[0].failed

    def look(self) -> None:
        """Tell of one that is complete by now."""
        if self._now is not None and self._now[0].over and not self._now[0].failed:
            self.finish()

    def finish(self) -> None:
        """Wait for one that is being written.

        Raises:
            Exception: It could not be written.
        """
        if self._now is None:
            return
        if not self._now[0].over:
            self._waits()
        (saving, step, trigger), self._now = self._now, None
        self.newest = saving.result()
        still = "" if saving.waited else f", {saving.blocked_s:.1f} s of it without training"
        self._tell(
            "checkpoint", f"checkpoint {self.newest.id} is complete ({trigger}, {saving.seconds:.1f} s{still})",
            id=self.newest.id, step=step, trigger=trigger, seconds=round(saving.seconds, 3), blocked_s=round(saving.blocked_s, 3),
        )  # fmt: skip

    def let_end(self) -> None:
        """Give one that is nearly there its time, whatever comes of it: a run that fails need not lose it."""
        if self._now is not None:
            self._now[0].let_end()
