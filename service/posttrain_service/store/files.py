"""Rows of uploaded files."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, Self

from sqlalchemy import Connection, Select, delete, func, select, tuple_
from sqlalchemy.exc import IntegrityError

from posttrain_service.clock import Clock
from posttrain_service.domain.files import UploadedFile
from posttrain_service.domain.job import Page
from posttrain_service.domain.lifecycle import TERMINAL
from posttrain_service.errors import Conflict, InvalidRequest, NotFound
from posttrain_service.store import idempotency as keys
from posttrain_service.store.engine import Database
from posttrain_service.store.idempotency import IdempotencyKey
from posttrain_service.store.tables import datasets, files, job_files, jobs
from posttrain_service.store.values import clean, to_file


class FileRows:
    """The table of files. An expired file is not there any more, whether or not it has been removed yet."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._owner: str | None = None

    def seen_by(self, owner: str | None) -> Self:
        """The same table as one owner sees it in `get` and `page`; None = whole."""
        view = copy.copy(self)
        view._owner = owner
        return view

    def insert(self, file: UploadedFile, *, idempotency: IdempotencyKey | None = None) -> tuple[UploadedFile, bool]:
        """Store a file's row, or find the file that the same request already made.

        Returns:
            The file, and whether it is new. When it isn't, the caller removes the bytes it had stored.

        Raises:
            InvalidRequest: The key came with another body before.
            Conflict: The file that the key made has been deleted since.
        """
        try:
            return self._insert(file, idempotency)
        except IntegrityError:  # another request with the same key was first
            return self._insert(file, idempotency)

    def _insert(self, file: UploadedFile, key: IdempotencyKey | None) -> tuple[UploadedFile, bool]:
        with self._database.write() as connection:
            now = self._clock.now()
            if key is not None and (file_id := keys.find(connection, key, now)) is not None:
                row = connection.execute(select(files).where(files.c.id == file_id)).mappings().first()
                if row is None:
                    raise Conflict(
                        f"the file that Idempotency-Key {key.key[:80]!r} made has been deleted; use a new key",
                        code="file_deleted",
                        param="Idempotency-Key",
                    )
                return to_file(row), False
            connection.execute(files.insert(), clean(file.__dict__))
            if key is not None:
                keys.remember(connection, key, file.id, now)
            return file, True

    def get(self, file_id: str) -> UploadedFile | None:
        """The file with this id."""
        with self._database.read() as connection:
            row = connection.execute(self._there().where(files.c.id == file_id)).mappings().first()
        return None if row is None else to_file(row)

    def page(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        purpose: str | None = None,
        owner: str | None = None,
        newest_first: bool = True,
    ) -> Page[UploadedFile]:
        """A page of files by age.

        Raises:
            InvalidRequest: The cursor names no file.
        """
        query = self._there()
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        if owner is not None:
            query = query.where(files.c.owner == owner)
        key = (files.c.created_at, files.c.id)
        with self._database.read() as connection:
            if after is not None:
                here, there = tuple_(*key), tuple_(*self._position(connection, after))
                query = query.where(here < there if newest_first else here > there)
            order = [column.desc() if newest_first else column for column in key]
            rows = connection.execute(query.order_by(*order).limit(limit + 1)).mappings().all()
        return Page([to_file(row) for row in rows[:limit]], has_more=len(rows) > limit)

    def delete(self, file_id: str) -> UploadedFile:
        """Remove a file's row; afterwards the caller removes its bytes.

        Raises:
            NotFound: There is no such file.
            Conflict: A job that has not ended reads it, or a data set is kept in it.
        """
        with self._database.write() as connection:
            row = connection.execute(select(files).where(files.c.id == file_id).with_for_update()).mappings().first()
            if row is None:
                raise NotFound(f"file {file_id[:80]!r} does not exist", code="file_not_found", param="file_id")
            user = connection.execute(_users(file_id).limit(1)).scalar_one_or_none()
            if user is not None:
                raise Conflict(
                    f"file {file_id} is used by job {user}, which has not ended; cancel the job or wait for its end",
                    code="file_in_use",
                    param="file_id",
                )
            holder = connection.execute(select(datasets.c.dataset_id).where(datasets.c.file_id == file_id).limit(1)).scalar_one_or_none()
            if holder is not None:
                raise Conflict(
                    f"file {file_id} holds the rows of data set {holder!r}; unregister that first", code="file_in_use", param="file_id"
                )
            connection.execute(delete(files).where(files.c.id == file_id))
            return to_file(row)

    def expired(self, limit: int = 100) -> list[UploadedFile]:
        """Files whose time is over and that no unended job reads, longest ago first: to be deleted."""
        used = select(job_files.c.file_id).join(jobs, jobs.c.run_id == job_files.c.run_id)
        used = used.where(jobs.c.state.not_in([state.value for state in TERMINAL]))
        query = select(files).where(files.c.expires_at <= self._clock.now(), files.c.id.not_in(used))
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(files.c.expires_at).limit(limit)).mappings().all()
        return [to_file(row) for row in rows]

    def known(self, file_ids: Collection[str]) -> set[str]:
        """Those of the ids that have a row, expired or not: bytes without one are left over from a crash."""
        with self._database.read() as connection:
            return set(connection.execute(select(files.c.id).where(files.c.id.in_(list(file_ids)))).scalars())

    def ids(self) -> set[str]:
        """Ids of all files that have a row."""
        with self._database.read() as connection:
            return set(connection.execute(select(files.c.id)).scalars())

    def bytes_by_owner(self) -> dict[str, int]:
        """Bytes of all files that have not been removed, for each owner that has some."""
        query = select(files.c.owner, func.sum(files.c.size_bytes)).group_by(files.c.owner)
        with self._database.read() as connection:
            return {str(owner): int(size) for owner, size in connection.execute(query)}

    def _there(self) -> Select[Any]:
        there = files.c.expires_at.is_(None) | (files.c.expires_at > self._clock.now())
        return self._own(select(files).where(there))

    def _own(self, query: Select[Any]) -> Select[Any]:
        return query if self._owner is None else query.where(files.c.owner == self._owner)

    def _position(self, connection: Connection, file_id: str) -> tuple[float, str]:
        query = self._own(select(files.c.created_at, files.c.id).where(files.c.id == file_id))
        row = connection.execute(query).first()
        if row is None:
            raise InvalidRequest(f"after names no file: {file_id[:80]!r}", code="invalid_cursor", param="after")
        return float(row[0]), str(row[1])


def _users(file_id: str) -> Select[tuple[str]]:
    query = select(jobs.c.job_uuid).join(job_files, job_files.c.run_id == jobs.c.run_id)
    return query.where(job_files.c.file_id == file_id, jobs.c.state.not_in([state.value for state in TERMINAL]))
