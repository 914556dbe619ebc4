"""Rows of jobs. `move` is the one place where a job changes its state: one guarded UPDATE with its event row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from posttrain_service.clock import Clock
from posttrain_service.domain.job import Job, Moved, NewEvent
from posttrain_service.domain.lifecycle import LIVE, TERMINAL, JobState, check_move, is_terminal
from posttrain_service.errors import Conflict, InvalidRequest
from posttrain_service.store import idempotency as keys
from posttrain_service.store import slots
from posttrain_service.store.engine import Database
from posttrain_service.store.events import insert_events
from posttrain_service.store.idempotency import IdempotencyKey
from posttrain_service.store.leases import Lease, holds
from posttrain_service.store.listing import JobLists
from posttrain_service.store.tables import files, job_files, job_labels, jobs, slot_leases
from posttrain_service.store.values import changed_columns, clean, job_columns, to_job
from posttrain_service.store.webhooks import announce

_INSERT_TRIES = 3


class JobRows(JobLists):
    """The table of jobs.

    Args:
        database: Where it is.
        clock: What time it is.
        on_move: Told of each job that was stored or moved, after it was; must not raise.
    """

    def __init__(self, database: Database, clock: Clock, on_move: Callable[[Moved], None] | None = None) -> None:
        super().__init__(database, clock)
        self._on_move = on_move or (lambda move: None)

    def insert(
        self, job: Job, event: NewEvent | Sequence[NewEvent], *, idempotency: IdempotencyKey | None = None
    ) -> tuple[Job, bool]:
        """Store a new job with its first events, or find the one that the same request already made.

        Args:
            job: The job, state queued.
            event: Its first event or events.
            idempotency: The key that came with the request.

        Returns:
            The stored job, and whether it is new.

        Raises:
            Conflict: `job_uuid` is taken by a job with another body (job_exists), or the job that the key made has
                been deleted since (job_deleted).
            InvalidRequest: The key came with another body before (idempotency_key_reused), or a file of the job has
                been deleted meanwhile (file_not_found).
        """
        events = [event] if isinstance(event, NewEvent) else list(event)
        stored, is_new = self._insert_or_find(job, events, idempotency)
        if is_new:
            self._on_move(Moved(stored, None, stored.created_at))
        return stored, is_new

    def _insert_or_find(self, job: Job, events: Sequence[NewEvent], key: IdempotencyKey | None) -> tuple[Job, bool]:
        for _ in range(_INSERT_TRIES - 1):
            try:
                return self._insert(job, events, key)
            except IntegrityError:  # somebody stored the same id or key a moment earlier: what follows finds it
                continue
        return self._insert(job, events, key)

    def _insert(self, job: Job, events: Sequence[NewEvent], key: IdempotencyKey | None) -> tuple[Job, bool]:
        with self._database.write() as connection:
            now = self._clock.now()
            if key is not None and (run_id := keys.find(connection, key, now)) is not None:
                return _made_before(connection, run_id, key), False
            row = connection.execute(select(jobs).where(jobs.c.job_uuid == job.job_uuid)).mappings().first()
            if row is not None:
                _check_same(job, row)
            else:
                _check_files(connection, job.file_ids)
                connection.execute(jobs.insert(), job_columns(job) | {"moved_at": job.moved_at or now})
                _insert_links(connection, job)
                insert_events(connection, job.run_id, events, now)
            stored = to_job(row) if row is not None else _read(connection, job.run_id)
            assert stored is not None
            if key is not None:
                keys.remember(connection, key, stored.run_id, now)
            return stored, row is None

    def move(
        self,
        run_id: str,
        expected: Collection[JobState],
        to: JobState,
        *,
        event: NewEvent | Sequence[NewEvent],
        changes: Mapping[str, Any] | None = None,
        expected_attempt: int | None = None,
        expected_version: int | None = None,
        fence: Lease | None = None,
        take: Sequence[str] = (),
        via: JobState | None = None,
    ) -> Job | None:
        """Move a job to another state, if it still is where the caller saw it.

        Devices are freed by every move out of the live states, in the same transaction; so a run must be swept
        before. Terminal moves set `ended_at`; moves to queued clear reason, error, want, ended_at and expires_at.

        Args:
            run_id: The job.
            expected: States in which the caller believes it is.
            to: The new state; a move that the table of moves doesn't have is a Conflict.
            event: Event or events of the move.
            changes: Further fields and their new values; a deadline that isn't named here is cleared.
            expected_attempt: Only while this is the newest attempt.
            expected_version: Only while the row has not changed in any way.
            fence: Only while this lease has not been taken over.
            take: Devices to take for the new attempt.
            via: The state in between, for an end that is retried at once: both moves or none.

        Returns:
            The job as moved; None when somebody else moved it, the fence is broken or a device is taken: look again.
        """
        expected = frozenset(expected)
        for state in expected:
            check_move(state, via or to)
        if via is not None:
            check_move(via, to)
        events = [event] if isinstance(event, NewEvent) else list(event)
        assert events, "every move has an event"
        guards = [jobs.c.run_id == run_id, jobs.c.state.in_([str(s) for s in expected]), jobs.c.condemned_at.is_(None)]
        if expected_attempt is not None:
            guards.append(jobs.c.attempt == expected_attempt)
        if expected_version is not None:
            guards.append(jobs.c.version == expected_version)
        try:
            with self._database.write() as connection:
                if fence is not None and not holds(connection, fence):
                    return None
                now = self._clock.now()
                values = _moved(to, now, changes or {})
                was = _stood(connection, run_id)
                if connection.execute(update(jobs).where(*guards).values(**values)).rowcount != 1:
                    return None
                job = _read(connection, run_id)
                assert job is not None
                assert was is not None
                if to not in LIVE:
                    slots.free(connection, run_id)
                if take:
                    slots.take(connection, take, run_id, job.attempt, now)
                insert_events(connection, run_id, events, now)
                announce(connection, job, now)
        except IntegrityError:
            if take and self._any_taken(take):
                return None
            raise
        self._on_move(Moved(job, *was, via))
        return job

    def update(
        self,
        run_id: str,
        changes: Mapping[str, Any],
        *,
        expected: Collection[JobState],
        event: NewEvent | Sequence[NewEvent] = (),
        expected_attempt: int | None = None,
        fence: Lease | None = None,
    ) -> Job | None:
        """Change fields of a job that stays in its state (one of `expected`); None when it has left it."""
        guards = [jobs.c.run_id == run_id, jobs.c.state.in_([str(s) for s in expected]), jobs.c.condemned_at.is_(None)]
        if expected_attempt is not None:
            guards.append(jobs.c.attempt == expected_attempt)
        with self._database.write() as connection:
            if fence is not None and not holds(connection, fence):
                return None
            values = changed_columns(changes) | {"version": jobs.c.version + 1}
            if connection.execute(update(jobs).where(*guards).values(**values)).rowcount != 1:
                return None
            events = [event] if isinstance(event, NewEvent) else list(event)
            insert_events(connection, run_id, events, self._clock.now())
            return _read(connection, run_id)

    def postpone_deadlines(self, seconds: float, *, fence: Lease) -> int:
        """Move the deadlines of all jobs that have not ended, because the clock was set; how many had one."""
        with self._database.write() as connection:
            if not holds(connection, fence):
                return 0
            pending = jobs.c.deadline_at.is_not(None) & jobs.c.state.not_in([str(s) for s in TERMINAL])
            values = {"deadline_at": jobs.c.deadline_at + seconds, "version": jobs.c.version + 1}
            return connection.execute(update(jobs).where(pending).values(**values)).rowcount

    def condemn(self, run_id: str) -> bool:
        """Begin to delete a terminal job: from now on it is hidden and can't be moved. False when it isn't terminal.

        Then the caller removes its artifacts and calls `delete`; `condemned()` lists what a crash left in between.
        """
        with self._database.write() as connection:
            ended = (jobs.c.run_id == run_id) & jobs.c.state.in_([str(s) for s in TERMINAL])
            mark = func.coalesce(jobs.c.condemned_at, self._clock.now())
            return connection.execute(update(jobs).where(ended).values(condemned_at=mark)).rowcount == 1

    def while_ended(self, run_id: str, act: Callable[[], None]) -> bool:
        """Do something short that must not meet a retry of the job: its move waits until `act` is over.

        False, and nothing done, when the job is not terminal.
        """
        with self._database.write() as connection:
            ended = (jobs.c.run_id == run_id) & jobs.c.state.in_([str(s) for s in TERMINAL])
            # An update, for PostgreSQL's sake: it locks the row, as SQLite's writer locks everything.
            if connection.execute(update(jobs).where(ended).values(version=jobs.c.version + 1)).rowcount != 1:
                return False
            act()
            return True

    def delete(self, run_id: str) -> bool:
        """Remove a condemned job's row with its events and labels; False when there is none."""
        with self._database.write() as connection:
            condemned = (jobs.c.run_id == run_id) & jobs.c.condemned_at.is_not(None)
            return connection.execute(delete(jobs).where(condemned)).rowcount == 1

    def _any_taken(self, devices: Sequence[str]) -> bool:
        with self._database.read() as connection:
            query = select(slot_leases.c.device).where(slot_leases.c.device.in_(list(devices)))
            return connection.execute(query).first() is not None


def _moved(to: JobState, now: float, changes: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"deadline_at": None}
    if to is JobState.QUEUED:
        values |= {"reason": None, "error": None, "want": None, "ended_at": None, "expires_at": None}
    if is_terminal(to):
        values |= {"ended_at": now}
    return values | changed_columns(changes) | {"state": str(to), "moved_at": now, "version": jobs.c.version + 1}


def _stood(connection: Connection, run_id: str) -> tuple[JobState, float] | None:
    """State and since when, told to who counts the moves; what decides on a move is its guarded update."""
    row = connection.execute(select(jobs.c.state, jobs.c.moved_at).where(jobs.c.run_id == run_id)).first()
    return None if row is None else (JobState(row[0]), float(row[1]))


def _read(connection: Connection, run_id: str) -> Job | None:
    row = connection.execute(select(jobs).where(jobs.c.run_id == run_id)).mappings().first()
    return None if row is None else to_job(row)


def _made_before(connection: Connection, run_id: str, key: IdempotencyKey) -> Job:
    query = select(jobs).where(jobs.c.run_id == run_id, jobs.c.condemned_at.is_(None))
    row = connection.execute(query).mappings().first()
    if row is None:
        raise Conflict(
            f"the job that Idempotency-Key {key.key[:80]!r} made has been deleted; use a new key to make another one",
            code="job_deleted",
            param="Idempotency-Key",
        )
    return to_job(row)


def _check_same(job: Job, row: RowMapping) -> None:
    if row["condemned_at"] is not None:
        raise Conflict(
            f"job {job.job_uuid} is being deleted; try again later or choose another job_uuid",
            code="job_exists",
            param="job_uuid",
        )
    if row["body_digest"] != job.body_digest or row["owner"] != job.owner:
        raise Conflict(
            f"job_uuid {job.job_uuid} is taken by a job with another request body; choose another one",
            code="job_exists",
            param="job_uuid",
        )


def _check_files(connection: Connection, file_ids: Sequence[str]) -> None:
    for file_id in sorted(set(file_ids)):
        # The lock holds off a deletion until this transaction has linked the file to the job.
        query = select(files.c.id).where(files.c.id == file_id).with_for_update(read=True)
        if connection.execute(query).first() is None:
            raise InvalidRequest(f"file {file_id} does not exist", code="file_not_found", param="dataset")


def _insert_links(connection: Connection, job: Job) -> None:
    labels = [
        {"run_id": job.run_id, "key": clean(key), "value": clean(value), "created_at": job.created_at}
        for key, value in job.metadata.items()
    ]
    if labels:
        connection.execute(job_labels.insert(), labels)
    links = [{"run_id": job.run_id, "file_id": file_id} for file_id in sorted(set(job.file_ids))]
    if links:
        connection.execute(job_files.insert(), links)
