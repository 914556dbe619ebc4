"""Rows of registered data sets. Each holds on to the file of its rows: that can't be deleted under it."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any, Self

from sqlalchemy import Select, delete, select, update
from sqlalchemy.exc import IntegrityError

from posttrain_service.clock import Clock
from posttrain_service.domain.registered import RegisteredSet
from posttrain_service.errors import Conflict
from posttrain_service.store.engine import Database
from posttrain_service.store.tables import datasets, files
from posttrain_service.store.values import clean


class DatasetRows:
    """The table of data sets."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._owner: str | None = None

    def seen_by(self, owner: str | None) -> Self:
        """The same table as one owner sees it; None = whole."""
        view = copy.copy(self)
        view._owner = owner
        return view

    def insert(self, made: RegisteredSet) -> None:
        """Store a new data set.

        Raises:
            Conflict: Its name is taken, be it by a data set that this owner doesn't see.
        """
        try:
            with self._database.write() as connection:
                connection.execute(datasets.insert(), clean(made.__dict__))
        except IntegrityError as error:
            raise Conflict(
                f"dataset_id {made.dataset_id!r} is taken; unregister that data set first, or choose another name",
                code="dataset_exists",
                param="dataset_id",
            ) from error

    def get(self, dataset_id: str) -> RegisteredSet | None:
        """The data set with this name."""
        with self._database.read() as connection:
            row = connection.execute(self._own(select(datasets).where(datasets.c.dataset_id == dataset_id))).mappings().first()
        return None if row is None else _to_set(row)

    def all(self) -> list[RegisteredSet]:
        """Every data set, oldest first."""
        query = self._own(select(datasets)).order_by(datasets.c.created_at, datasets.c.dataset_id)
        with self._database.read() as connection:
            return [_to_set(row) for row in connection.execute(query).mappings()]

    def delete(self, dataset_id: str) -> RegisteredSet | None:
        """Remove a data set, None when there is none. Its file's time is over at once: it goes when no unended job reads it."""
        with self._database.write() as connection:
            found = self._own(select(datasets).where(datasets.c.dataset_id == dataset_id))
            row = connection.execute(found).mappings().first()
            if row is None:
                return None
            connection.execute(delete(datasets).where(datasets.c.dataset_id == dataset_id))
            connection.execute(update(files).where(files.c.id == row["file_id"]).values(expires_at=self._clock.now()))
            return _to_set(row)

    def _own(self, query: Select[Any]) -> Select[Any]:
        return query if self._owner is None else query.where(datasets.c.owner == self._owner)


def _to_set(row: Any) -> RegisteredSet:
    return RegisteredSet(**{field.name: row[field.name] for field in fields(RegisteredSet)})
