"""Leases: one holder of a name at a time, with a fencing token that rises whenever the holder changes.

What the holder writes carries its token, so that a holder that slept past its time (a stopped process, a long pause)
changes nothing after another one took over.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select, update
from sqlalchemy.exc import IntegrityError

from posttrain_service.clock import Clock
from posttrain_service.store.engine import Database
from posttrain_service.store.tables import leases

SCHEDULER = "scheduler"
"""The lease of the one acting scheduler and supervisor."""


@dataclass(frozen=True)
class Lease:
    """A lease as it was taken or renewed."""

    name: str
    holder: str
    token: int
    expires_at: float


class LeaseRows:
    """The table of leases."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        """Take the lease, or renew it when `holder` has it; None when somebody else's hasn't run out.

        The token stays the same as long as the holder does without a gap, and rises otherwise.
        """
        try:
            return self._acquire(name, holder, ttl_s)
        except IntegrityError:  # two took the name's first lease at once
            return self._acquire(name, holder, ttl_s)

    def _acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        with self._database.write() as connection:
            row = connection.execute(select(leases).where(leases.c.name == name).with_for_update()).mappings().first()
            now = self._clock.now()
            lease = Lease(name, holder, 1, now + ttl_s)
            if row is None:
                connection.execute(leases.insert(), lease.__dict__)
                return lease
            running = row["expires_at"] > now
            if running and row["holder"] != holder:
                return None
            token = row["token"] if running else row["token"] + 1
            lease = Lease(name, holder, token, now + ttl_s)
            connection.execute(update(leases).where(leases.c.name == name).values(**lease.__dict__))
            return lease

    def release(self, lease: Lease) -> bool:
        """Give the lease back so that another one can take it at once; False when it was lost before."""
        with self._database.write() as connection:
            mine = (leases.c.name == lease.name) & (leases.c.token == lease.token) & (leases.c.holder == lease.holder)
            return connection.execute(update(leases).where(mine).values(expires_at=0.0)).rowcount == 1

    def holder(self, name: str) -> Lease | None:
        """Who holds the lease now; None when nobody does."""
        with self._database.read() as connection:
            row = connection.execute(select(leases).where(leases.c.name == name)).mappings().first()
        return Lease(**row) if row is not None and row["expires_at"] > self._clock.now() else None


def holds(connection: Connection, fence: Lease) -> bool:
    """Whether nobody took the lease over, checked inside a writer's transaction; keeps it so until its end."""
    query = select(leases.c.token).where(leases.c.name == fence.name).with_for_update(read=True)
    return connection.execute(query).scalar_one_or_none() == fence.token
