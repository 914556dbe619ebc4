"""Events of jobs: appended, and read after a cursor."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Select, select

from posttrain_service.clock import Clock
from posttrain_service.domain.job import Event, NewEvent, Page
from posttrain_service.store.engine import Database
from posttrain_service.store.tables import events, jobs
from posttrain_service.store.values import clean, to_event


class EventRows:
    """The table of events."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def append(self, run_id: str, *new: NewEvent) -> bool:
        """Add events to a job, in order; False when the job is gone."""
        with self._database.write() as connection:
            # The lock keeps the ids of one job rising in the order of their commits, or a reader with a cursor
            # could step over an event that commits late (PostgreSQL).
            query = select(jobs.c.run_id).where(jobs.c.run_id == run_id).with_for_update()
            if connection.execute(query).first() is None:
                return False
            insert_events(connection, run_id, new, self._clock.now())
            return True

    def page(
        self, job_uuid: str, *, after: int | None = None, limit: int = 100, newest_first: bool = False
    ) -> Page[Event]:
        """Events of a job beyond the cursor: later than it, or earlier with `newest_first`.

        Args:
            job_uuid: The job; an unknown one has no events.
            after: Id of the last event that was seen; None = from the beginning (the end, with `newest_first`).
            limit: Most events, at least 1.
            newest_first: Read backwards.
        """
        query = page_query(job_uuid, after, limit, newest_first)
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        return Page([to_event(row) for row in rows[:limit]], has_more=len(rows) > limit)


def page_query(job_uuid: str, after: int | None, limit: int, newest_first: bool) -> Select[tuple[object, ...]]:
    """The query behind `EventRows.page`: one row more than `limit` tells whether there is more."""
    run_id = select(jobs.c.run_id).where(jobs.c.job_uuid == job_uuid).scalar_subquery()
    query = select(events, jobs.c.job_uuid).join(jobs, jobs.c.run_id == events.c.run_id).where(events.c.run_id == run_id)
    if after is not None:
        query = query.where(events.c.id < after if newest_first else events.c.id > after)
    return query.order_by(events.c.id.desc() if newest_first else events.c.id).limit(limit + 1)


def insert_events(connection: Connection, run_id: str, new: Sequence[NewEvent], now: float) -> None:
    """Add events inside a transaction that has written the job's row, or locked it."""
    for event in new:  # one by one: their ids then follow their order
        row = {
            "run_id": run_id,
            "created_at": now if event.created_at is None else event.created_at,
            "type": event.type,
            "level": event.level,
            "message": clean(event.message),
            "data": clean(event.data),
        }
        connection.execute(events.insert(), row)
