"""The outbox of webhooks: a message is put there in the transaction that ends its job, and stays until it is delivered."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, select, update

from posttrain_service.clock import Clock
from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import is_terminal
from posttrain_service.store.engine import Database
from posttrain_service.store.tables import webhooks
from posttrain_service.store.values import clean
from posttrain_service.wire.webhooks import new_webhook_id, webhook_body


@dataclass(frozen=True)
class Message:
    """One message that waits for its delivery."""

    id: str
    run_id: str
    url: str
    body: str
    created_at: float
    tries: int
    """How often its delivery has failed."""
    next_try_at: float


class WebhookRows:
    """The table of messages; `JobRows.move` alone adds to it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def due(self, limit: int) -> list[Message]:
        """Messages whose time has come, longest overdue first."""
        query = select(webhooks).where(webhooks.c.next_try_at <= self._clock.now())
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(webhooks.c.next_try_at, webhooks.c.id).limit(limit)).mappings().all()
        return [Message(**row) for row in rows]

    def postpone(self, message: Message, next_try_at: float) -> None:
        """Note a failed try, and when the next one is due."""
        changes = {"tries": message.tries + 1, "next_try_at": next_try_at}
        with self._database.write() as connection:
            connection.execute(update(webhooks).where(webhooks.c.id == message.id).values(**changes))

    def remove(self, message: Message) -> None:
        """Take a message out: it was delivered, or is given up."""
        with self._database.write() as connection:
            connection.execute(delete(webhooks).where(webhooks.c.id == message.id))


def announce(connection: Connection, job: Job, now: float) -> None:
    """Put the message of a job's end into the outbox, inside the transaction that ends it, if the job asked for one."""
    url = job.spec.get("webhook_url")
    if url is None or not is_terminal(job.state):
        return
    row = {"id": new_webhook_id(), "run_id": job.run_id, "url": url, "body": clean(webhook_body(job))}
    connection.execute(webhooks.insert(), row | {"created_at": now, "tries": 0, "next_try_at": now})
