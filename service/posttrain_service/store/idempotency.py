"""Idempotency keys: which request already made which thing. Remembered in the transaction that makes the thing."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, select

from posttrain_service.clock import Clock
from posttrain_service.errors import InvalidRequest
from posttrain_service.store.engine import Database
from posttrain_service.store.tables import idempotency


@dataclass(frozen=True)
class IdempotencyKey:
    """A key that came with a request."""

    owner: str
    scope: str
    """What was asked for, e.g. "jobs.create"; the same key may be used once in each scope."""
    key: str
    body_digest: str
    """SHA-256 over the request's body."""
    ttl_s: float
    """How long the key is remembered."""


class IdempotencyRows:
    """The table of keys."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find(self, key: IdempotencyKey) -> str | None:
        """Id of the thing that this key made; None when the key is new or forgotten.

        Raises:
            InvalidRequest: The key came with another body.
        """
        with self._database.read() as connection:
            return find(connection, key, self._clock.now())

    def forget_expired(self) -> int:
        """Remove the keys whose time is over; returns how many."""
        with self._database.write() as connection:
            return connection.execute(delete(idempotency).where(idempotency.c.expires_at <= self._clock.now())).rowcount


def find(connection: Connection, key: IdempotencyKey, now: float) -> str | None:
    """`IdempotencyRows.find` inside a transaction."""
    row = connection.execute(select(idempotency).where(*_is(key))).mappings().first()
    if row is None or row["expires_at"] <= now:
        return None
    if row["body_digest"] != key.body_digest:
        raise InvalidRequest(
            f"Idempotency-Key {key.key[:80]!r} was used with another request body; use a new key for a new request",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )
    return str(row["resource_id"])


def remember(connection: Connection, key: IdempotencyKey, resource_id: str, now: float) -> None:
    """Write down what a key made, inside the transaction that makes it.

    Raises:
        sqlalchemy.exc.IntegrityError: Another transaction wrote the same key first; roll back and look again.
    """
    connection.execute(delete(idempotency).where(*_is(key), idempotency.c.expires_at <= now))
    row = {
        "owner": key.owner,
        "scope": key.scope,
        "key": key.key,
        "body_digest": key.body_digest,
        "resource_id": resource_id,
        "created_at": now,
        "expires_at": now + key.ttl_s,
    }
    connection.execute(idempotency.insert(), row)


def _is(key: IdempotencyKey) -> tuple[ColumnElement[bool], ...]:
    columns = idempotency.c
    return columns.owner == key.owner, columns.scope == key.scope, columns.key == key.key
