"""`Store`: one object holding the parts of the database; thread-safe, blocking."""

from __future__ import annotations

import copy
from collections.abc import Callable

from sqlalchemy import Engine, text

from posttrain_service.clock import Clock, SystemClock
from posttrain_service.domain.job import Moved
from posttrain_service.store.datasets import DatasetRows
from posttrain_service.store.engine import Database
from posttrain_service.store.events import EventRows
from posttrain_service.store.files import FileRows
from posttrain_service.store.idempotency import IdempotencyRows
from posttrain_service.store.jobs import JobRows
from posttrain_service.store.keys import KeyRows
from posttrain_service.store.leases import LeaseRows
from posttrain_service.store.slots import SlotRows
from posttrain_service.store.webhooks import WebhookRows


class Store:
    """Everything that is kept in the database.

    Args:
        engine: From `store.engine.make_engine`, its schema made current by `store.upgrade.upgrade`.
        clock: What time it is.
        busy_timeout_s: How long a writer of this process waits for its turn on SQLite.
        on_move: Told of each job that was stored or moved; must not raise.

    Every method may raise StoreBusy or Unavailable (try again) and DiskFull.
    """

    def __init__(
        self, engine: Engine, clock: Clock | None = None, *, busy_timeout_s: float = 30.0, on_move: Callable[[Moved], None] | None = None
    ) -> None:
        clock = clock or SystemClock()
        self.database = Database(engine, busy_timeout_s=busy_timeout_s)
        self.jobs = JobRows(self.database, clock, on_move)
        self.events = EventRows(self.database, clock)
        self.files = FileRows(self.database, clock)
        self.datasets = DatasetRows(self.database, clock)
        self.slots = SlotRows(self.database)
        self.leases = LeaseRows(self.database, clock)
        self.idempotency = IdempotencyRows(self.database, clock)
        self.webhooks = WebhookRows(self.database, clock)
        self.keys = KeyRows(self.database, clock)

    def seen_by(self, owner: str | None) -> Store:
        """The same store as it is for one owner: other owners' jobs, files and data sets are not there. None = everybody's are.

        What the loops work on (queues, live jobs, what has expired) is the same for all.
        """
        if owner is None:
            return self
        view = copy.copy(self)
        view.jobs, view.files = self.jobs.seen_by(owner), self.files.seen_by(owner)
        view.datasets = self.datasets.seen_by(owner)
        return view

    def check_writable(self) -> None:
        """Take and give back the right to write, for health checks.

        Raises:
            ServiceError: StoreBusy, Unavailable or DiskFull.
        """
        with self.database.write() as connection:
            connection.execute(text("UPDATE leases SET expires_at = expires_at WHERE name = ''"))

    def close(self) -> None:
        """Close all pooled connections."""
        self.database.engine.dispose()
