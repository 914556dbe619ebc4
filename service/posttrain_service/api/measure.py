"""The layer around all others that times requests, and the watch over the event loop's lag."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain_service.work.meters import Meters

LAG_EVERY_S = 0.5
"""Time between two measurements of the event loop's lag."""


class Measure:
    """Wraps the application; plain ASGI, so that streams pass through unbuffered.

    Args:
        app: What answers.
        meters: What counts, once the application runs.
    """

    def __init__(self, app: ASGIApp, *, meters: Callable[[], Meters]) -> None:
        self.app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        meters = self._meters()
        began = time.monotonic()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                meters.request(scope["method"], template_of(scope), message["status"], time.monotonic() - began)
            await send(message)

        with meters.open.track_inprogress():
            await self.app(scope, receive, timed)


def template_of(scope: Scope) -> str:
    """The path of the route that took the request, with its parameters' names; "" when none did."""
    return str(getattr(scope.get("route"), "path", ""))


async def watch_lag(meters: Meters, every_s: float = LAG_EVERY_S) -> None:
    """Measure, until cancelled, how late the event loop wakes a sleeper."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every_s
        await asyncio.sleep(every_s)
        meters.lag(max(0.0, loop.time() - due))
