"""Reading jobs: one, pages by keyset (their cost does not grow with the table), and the lists the loops work on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sqlalchemy import Connection, Select, func, select, tuple_

from posttrain_service.clock import Clock
from posttrain_service.domain.job import Job, Page
from posttrain_service.domain.lifecycle import LIVE, TERMINAL, JobState
from posttrain_service.errors import InvalidRequest
from posttrain_service.store.engine import Database
from posttrain_service.store.tables import job_labels, jobs
from posttrain_service.store.values import to_job

Jobs = Select[tuple[object, ...]]


class JobLists:
    """The reading half of the table of jobs. A condemned job is not there, but for `condemned` and `exists`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._owner: str | None = None

    def seen_by(self, owner: str | None) -> Self:
        """The same table as one owner sees it in what shows jobs and counts them; None = whole.

        What the loops work on (`queued`, `live`, ...) stays whole.
        """
        view = copy.copy(self)
        view._owner = owner
        return view

    def get(self, job_uuid: str) -> Job | None:
        """The job that clients know by this id."""
        return self._one(self._own(select(jobs).where(jobs.c.job_uuid == job_uuid, jobs.c.condemned_at.is_(None))))

    def get_run(self, run_id: str) -> Job | None:
        """The job whose folder has this name."""
        return self._one(self._own(select(jobs).where(jobs.c.run_id == run_id, jobs.c.condemned_at.is_(None))))

    def exists(self, run_id: str) -> bool:
        """Whether there is a row for this folder, condemned or not."""
        with self._database.read() as connection:
            return connection.execute(select(jobs.c.run_id).where(jobs.c.run_id == run_id)).first() is not None

    def page(
        self,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        status: Sequence[JobState] = (),
        owner: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page[Job]:
        """A page of jobs, newest first.

        Args:
            after: Job id after which (towards older jobs) the page begins.
            before: Job id before which (towards newer jobs) the page ends; not together with `after`.
            limit: Most jobs, at least 1.
            status: Only jobs in these states; empty = all.
            owner: Only this owner's jobs; None = everybody's.
            metadata: Only jobs that have all these labels; empty = only jobs without labels; None = all.

        Raises:
            InvalidRequest: The cursor names no job, or both cursors are given.
        """
        if after is not None and before is not None:
            raise InvalidRequest("after and before exclude each other; give one", param="before")
        cursor = after if after is not None else before
        states: Sequence[JobState | None] = sorted(set(status)) or [None]
        with self._database.read() as connection:
            param = "before" if after is None else "after"
            position = None if cursor is None else self._position(connection, cursor, param)
            found: list[Job] = []
            for state in states:  # one indexed query for each state, merged: no state makes the others slow
                query = self._own(page_query(position, before is not None, limit, state, owner, metadata))
                found += [to_job(row) for row in connection.execute(query).mappings()]
        found.sort(key=lambda job: (job.created_at, job.run_id), reverse=before is None)
        data = found[:limit]
        return Page(data if before is None else data[::-1], has_more=len(found) > limit)

    def states(self) -> list[tuple[str, JobState]]:
        """Id and state of every job, newest first; no more of the rows is read."""
        query = self._own(select(jobs.c.job_uuid, jobs.c.state).where(jobs.c.condemned_at.is_(None)))
        with self._database.read() as connection:
            found = connection.execute(query.order_by(jobs.c.created_at.desc(), jobs.c.run_id.desc()))
            return [(str(job_uuid), JobState(state)) for job_uuid, state in found]

    def queued(self, limit: int = 1000) -> list[Job]:
        """The first jobs in the queue: highest priority, then oldest."""
        query = select(jobs).where(jobs.c.state == JobState.QUEUED.value, jobs.c.condemned_at.is_(None))
        order = (jobs.c.priority.desc(), jobs.c.created_at, jobs.c.run_id)
        return self._many(query.order_by(*order).limit(limit))

    def live(self, known: Mapping[str, Job] | None = None) -> list[Job]:
        """Jobs that may have processes: launching, running and stopping, oldest first.

        Args:
            known: Live jobs as they were read before, by run id; rows that have not changed since aren't read again.
        """
        known = known or {}
        are_live = jobs.c.state.in_([state.value for state in LIVE])
        query = select(jobs.c.run_id, jobs.c.version).where(are_live).order_by(jobs.c.created_at, jobs.c.run_id)
        with self._database.read() as connection:
            now = [(str(run_id), int(version)) for run_id, version in connection.execute(query)]
            found = {run_id: known[run_id] for run_id, version in now if run_id in known and known[run_id].version == version}
            if len(found) < len(now):
                names = [run_id for run_id, _ in now if run_id not in found]
                rows = connection.execute(select(jobs).where(are_live, jobs.c.run_id.in_(names))).mappings()
                found |= {job.run_id: job for job in map(to_job, rows)}
        return [found[run_id] for run_id, _ in now if run_id in found]

    def paused(self, limit: int = 1000) -> list[Job]:
        """Paused jobs, oldest first."""
        query = select(jobs).where(jobs.c.state == JobState.PAUSED.value, jobs.c.condemned_at.is_(None))
        return self._many(query.order_by(jobs.c.created_at, jobs.c.run_id).limit(limit))

    def overdue(self, limit: int = 100) -> list[Job]:
        """Queued and paused jobs whose deadline is over, longest ago first."""
        waiting = jobs.c.state.in_([JobState.QUEUED.value, JobState.PAUSED.value])
        query = select(jobs).where(waiting, jobs.c.deadline_at <= self._clock.now())
        return self._many(query.order_by(jobs.c.deadline_at).limit(limit))

    def expired(self, now: float | None = None, limit: int = 100) -> list[Job]:
        """Ended jobs whose retention is over at `now` (None = at present), longest ago first."""
        ended = jobs.c.state.in_([state.value for state in TERMINAL])
        query = select(jobs).where(
            ended, jobs.c.expires_at <= (self._clock.now() if now is None else now), jobs.c.condemned_at.is_(None)
        )
        return self._many(query.order_by(jobs.c.expires_at).limit(limit))

    def condemned(self, limit: int = 100) -> list[Job]:
        """Jobs whose deletion has begun, and has to be finished."""
        query = select(jobs).where(jobs.c.condemned_at.is_not(None))
        return self._many(query.order_by(jobs.c.condemned_at).limit(limit))

    def count_by_state(self) -> dict[JobState, int]:
        """Number of jobs in each state."""
        query = self._own(select(jobs.c.state, func.count()).where(jobs.c.condemned_at.is_(None))).group_by(jobs.c.state)
        with self._database.read() as connection:
            counts = {str(state): int(count) for state, count in connection.execute(query)}
        return {state: counts.get(state.value, 0) for state in JobState}

    def count_unended(self) -> dict[JobState, int]:
        """Number of jobs in each state that is no end; ended jobs, however many, cost nothing."""
        states = [state for state in JobState if state not in TERMINAL]
        # Only ended jobs are condemned: without that condition an index answers alone.
        query = self._own(select(jobs.c.state, func.count()).where(jobs.c.state.in_([state.value for state in states])))
        with self._database.read() as connection:
            counts = {str(state): int(count) for state, count in connection.execute(query.group_by(jobs.c.state))}
        return {state: counts.get(state.value, 0) for state in states}

    def queued_since(self) -> float | None:
        """Since when the oldest of the queued jobs has been in the queue; None for an empty queue."""
        query = self._own(select(jobs.c.moved_at).where(jobs.c.state == JobState.QUEUED.value))
        with self._database.read() as connection:
            row = connection.execute(query.order_by(jobs.c.created_at, jobs.c.run_id).limit(1)).first()
        return None if row is None else float(row[0])

    def count_live_by_owner(self) -> dict[str, int]:
        """Number of live jobs of each owner that has some, for fair shares."""
        live = jobs.c.state.in_([state.value for state in LIVE])
        with self._database.read() as connection:
            rows = connection.execute(select(jobs.c.owner, func.count()).where(live).group_by(jobs.c.owner)).all()
        return {str(owner): int(count) for owner, count in rows}

    def owners(self) -> dict[str, tuple[str, int]]:
        """Owner and version of every job that has a folder, by run id; the version of an ended job stays what it is."""
        with self._database.read() as connection:
            rows = connection.execute(select(jobs.c.run_id, jobs.c.owner, jobs.c.version, jobs.c.state)).all()
        ended = {state.value for state in TERMINAL}
        return {str(run_id): (str(owner), int(version) if state in ended else -1) for run_id, owner, version, state in rows}

    def _one(self, query: Jobs) -> Job | None:
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else to_job(row)

    def _own(self, query: Select[Any]) -> Select[Any]:
        return query if self._owner is None else query.where(jobs.c.owner == self._owner)

    def _position(self, connection: Connection, job_uuid: str, param: str) -> tuple[float, str]:
        query = self._own(select(jobs.c.created_at, jobs.c.run_id).where(jobs.c.job_uuid == job_uuid))
        row = connection.execute(query).first()
        if row is None:
            raise InvalidRequest(f"{param} names no job: {job_uuid[:140]!r}", code="invalid_cursor", param=param)
        return float(row[0]), str(row[1])

    def _many(self, query: Jobs) -> list[Job]:
        with self._database.read() as connection:
            return [to_job(row) for row in connection.execute(query).mappings()]


def page_query(
    position: tuple[float, str] | None,
    backwards: bool,
    limit: int,
    state: JobState | None,
    owner: str | None,
    metadata: Mapping[str, str] | None,
) -> Jobs:
    """The query behind `JobLists.page`: one row more than `limit` tells whether there is more.

    Args:
        position: (created_at, run_id) of the job at the cursor.
        backwards: Towards newer jobs, oldest of them first.
        limit: Most jobs.
        state: Only this state.
        owner: Only this owner.
        metadata: Only with these labels (the first one's index leads, the others filter); empty = only without any.
    """
    query = select(jobs).where(jobs.c.condemned_at.is_(None))
    created_at, run_id = jobs.c.created_at, jobs.c.run_id
    for number, (key, value) in enumerate(sorted((metadata or {}).items())):
        label = job_labels.alias(f"label_{number}")
        query = query.join(label, label.c.run_id == jobs.c.run_id).where(label.c.key == key, label.c.value == value)
        if number == 0:
            created_at, run_id = label.c.created_at, label.c.run_id
    if metadata is not None and not metadata:
        query = query.where(~select(job_labels.c.run_id).where(job_labels.c.run_id == jobs.c.run_id).exists())
    if state is not None:
        query = query.where(jobs.c.state == state.value)
    if owner is not None:
        query = query.where(jobs.c.owner == owner)
    if position is not None:
        here, there = tuple_(created_at, run_id), tuple_(*position)
        query = query.where(here > there if backwards else here < there)
    order = (created_at, run_id) if backwards else (created_at.desc(), run_id.desc())
    return query.order_by(*order).limit(limit + 1)

