"""Slot leases: which device belongs to which attempt. Taken and freed in the transaction that moves the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, select

from posttrain_service.store.engine import Database
from posttrain_service.store.tables import slot_leases


@dataclass(frozen=True)
class SlotLease:
    """One device in use."""

    device: str
    run_id: str
    attempt: int
    taken_at: float


class SlotRows:
    """The table of slot leases; `JobRows.move` alone writes it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def taken(self) -> list[SlotLease]:
        """Every device in use, by name."""
        with self._database.read() as connection:
            rows = connection.execute(select(slot_leases).order_by(slot_leases.c.device)).mappings().all()
        return [SlotLease(**row) for row in rows]


def take(connection: Connection, devices: Sequence[str], run_id: str, attempt: int, now: float) -> None:
    """Take devices for an attempt inside a transaction.

    Raises:
        sqlalchemy.exc.IntegrityError: One of them is in use; the transaction must be rolled back.
    """
    rows = [{"device": d, "run_id": run_id, "attempt": attempt, "taken_at": now} for d in sorted(devices)]
    connection.execute(slot_leases.insert(), rows)


def free(connection: Connection, run_id: str) -> None:
    """Give back every device of a job inside a transaction."""
    connection.execute(delete(slot_leases).where(slot_leases.c.run_id == run_id))
