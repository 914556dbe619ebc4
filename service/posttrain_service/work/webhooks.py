"""Loop: deliver the messages of the outbox. No job, request or other loop ever waits for a receiver.

A message leaves the outbox when a receiver has taken it with a 2xx, so it arrives at least once; a server that is killed
between answer and note sends it again, under the same id. A host name is looked up once for each try and that very
address is connected to, so a name can't point elsewhere after it was checked. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

import httpx

from posttrain_service.clock import Clock
from posttrain_service.domain.job import NewEvent
from posttrain_service.domain.webhooks import GONE, is_public, named_address, next_try_at
from posttrain_service.errors import InvalidRequest
from posttrain_service.logs import log_context
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.store.webhooks import Message
from posttrain_service.wire.webhooks import webhook_headers
from posttrain_service.work.leader import Leader

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Most deliveries side by side."""


class NotDelivered(Exception):
    """Why a try failed; `final`: another one is of no use."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


@dataclass(frozen=True)
class Webhooks:
    """Delivers messages."""

    settings: Settings
    store: Store
    clock: Clock
    leader: Leader
    trusted: ssl.SSLContext | None = None
    """Whose certificates count; None = the usual authorities."""

    def round(self) -> float | None:
        """Deliver what is due, if this process acts; 0 when there may be more."""
        if self.leader.lease() is None:
            return None
        due = self.store.webhooks.due(AT_ONCE)
        if not due:
            return None
        for message, failure in zip(due, asyncio.run(self._send_all(due)), strict=True):
            self._note(message, failure)
        return 0.0 if len(due) == AT_ONCE else None

    async def _send_all(self, messages: list[Message]) -> list[NotDelivered | None]:
        trusted = self.trusted or _usual_authorities()
        # A proxy of the environment would look names up once more, by itself. A kept connection would be found by its
        # address and used for another name there, which its certificate was never checked for.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            timeout=self.settings.webhook_timeout_s, follow_redirects=False, trust_env=False, verify=trusted, limits=limits
        ) as client:
            return await asyncio.gather(*(self._try(client, message) for message in messages))

    async def _try(self, client: httpx.AsyncClient, message: Message) -> NotDelivered | None:
        limit_s = self.settings.webhook_timeout_s
        try:
            async with asyncio.timeout(limit_s):  # over all: a receiver that sends a byte now and then holds up nobody
                await self._send(client, message)
        except TimeoutError:
            return NotDelivered(f"it did not answer within {limit_s:g} s")
        except NotDelivered as failure:
            return failure
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return NotDelivered(f"it cannot be reached: {error}")
        return None

    async def _send(self, client: httpx.AsyncClient, message: Message) -> None:
        url = httpx.URL(message.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        address = await self._address(url.host, port)
        headers = webhook_headers(message.id, self.clock.now(), message.body, self.settings.webhook_key)
        headers["host"] = url.netloc.decode("ascii")
        request = client.build_request(
            "POST", url.copy_with(host=address), content=message.body.encode(), headers=headers,
            extensions={"sni_hostname": url.host},
        )  # fmt: skip
        answer = await client.send(request, stream=True)  # what it says besides is not read
        await answer.aclose()
        if not answer.is_success:
            where = "; redirects are not followed" if answer.is_redirect else ""
            raise NotDelivered(f"it answered {answer.status_code}{where}", final=answer.status_code == GONE)

    async def _address(self, host: str, port: int) -> str:
        """The one address that is connected to."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not self.settings.webhook_allow_private:
            addresses = [address for address in addresses if is_public(address)]
        if not addresses:
            raise NotDelivered("its name leads to a private, loopback or link-local address, which is not allowed here")
        return addresses[0]

    def _note(self, message: Message, failure: NotDelivered | None) -> None:
        host = urlsplit(message.url).hostname  # the rest of the URL may hold a secret
        data = {"webhook_id": message.id, "host": host, "tries": message.tries + 1}
        if failure is None:
            self.store.webhooks.remove(message)
            self.store.events.append(message.run_id, NewEvent("webhook", f"{host} was told of the job's end", data=data))
            return
        with log_context(run=message.run_id):
            log.warning("webhook %s to %s, try %d: %s", message.id, host, message.tries + 1, failure)
        again = None if failure.final else next_try_at(message.tries + 1, self.clock.now())
        if again is not None:
            self.store.webhooks.postpone(message, again)
            return
        self.store.webhooks.remove(message)
        text = f"{host} could not be told of the job's end, in {message.tries + 1} tries; the last one: {failure}"
        self.store.events.append(message.run_id, NewEvent("webhook", text, "warn", data))


@cache
def _usual_authorities() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reading them all takes a while, so once


def check_webhook(url: str | None, settings: Settings) -> list[str]:
    """What whoever asks for a webhook should know.

    Raises:
        InvalidRequest: The URL itself names an address that may not be told.
    """
    if url is None:
        return []
    address = named_address(url)
    if address is not None and not settings.webhook_allow_private and not is_public(address):
        raise InvalidRequest(
            f"webhook_url leads to {address}, which is a private, loopback or link-local address; use a public one, "
            "or have the server run with POSTTRAIN_WEBHOOK_ALLOW_PRIVATE",
            param="webhook_url",
        )
    if settings.webhook_key is None:
        return ["webhooks of this job are not signed, since the server has no POSTTRAIN_WEBHOOK_SECRET"]
    return []
