"""Rows of API keys. A revoked key keeps its row: it says who had it, and that keys are in use."""

from __future__ import annotations

from dataclasses import fields

from sqlalchemy import select, update

from posttrain_service.clock import Clock
from posttrain_service.domain.keys import ApiKey
from posttrain_service.store.engine import Database
from posttrain_service.store.tables import api_keys


class KeyRows:
    """The table of keys. Nothing of it is remembered: what was revoked anywhere is refused by the next look."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def insert(self, key: ApiKey) -> None:
        """Store a new key."""
        with self._database.write() as connection:
            connection.execute(api_keys.insert(), {field.name: getattr(key, field.name) for field in fields(ApiKey)})

    def get(self, key_id: str) -> ApiKey | None:
        """The key with this id, revoked or not."""
        with self._database.read() as connection:
            row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).mappings().first()
        return None if row is None else ApiKey(**row)

    def all(self) -> list[ApiKey]:
        """Every key, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)).mappings()
            return [ApiKey(**row) for row in rows]

    def any(self) -> bool:
        """Whether there has ever been a key: from then on requests need one, also when all are revoked."""
        with self._database.read() as connection:
            return connection.execute(select(api_keys.c.id).limit(1)).first() is not None

    def revoke(self, key_id: str) -> ApiKey | None:
        """Refuse the key from now on; None when there is none. Repeating changes nothing."""
        with self._database.write() as connection:
            good = (api_keys.c.id == key_id) & api_keys.c.revoked_at.is_(None)
            connection.execute(update(api_keys).where(good).values(revoked_at=self._clock.now()))
        return self.get(key_id)
