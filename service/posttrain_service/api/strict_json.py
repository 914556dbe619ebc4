"""Routes that read their JSON strictly: a key that stands twice in one object is refused instead of losing a value."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from posttrain_trainer.contract.rowfile import strict_object


class StrictRequest(Request):
    """A request whose body is read by `strict_object`."""

    async def json(self) -> Any:
        """The body's value.

        Raises:
            ValueError: It is no JSON, or an object in it holds a key twice.
        """
        if not hasattr(self, "_json"):
            self._json = json.loads(await self.body(), object_pairs_hook=strict_object)
        return self._json


class StrictRoute(APIRoute):
    """Every route with a JSON body is one of these; a test sees to it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a `StrictRequest`."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive, request._send))

        return strictly
