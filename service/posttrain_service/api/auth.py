"""The gate: who calls, and whether their key reaches that far. Plain ASGI, inside the edge and before every route.

What a route adds is closed until it is named here: each path needs a key where there are keys, a method that only looks
the scope read, every other one submit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain_service.api.answers import Answer, error_answer
from posttrain_service.api.errors import service_error_answer
from posttrain_service.domain import keys
from posttrain_service.domain.keys import Caller
from posttrain_service.errors import ServiceError, Unauthorized
from posttrain_service.work.services import Services

OPEN = frozenset({"/health/live", "/health/ready", "/version", "/openapi.json"})
"""Whoever watches the service has no key, and whoever writes a client needs the description: both tell nothing of jobs."""
PAGE = "/"
ASSETS = "/dashboard/"
"""The dashboard's page and what lies below that path: files of the program, without a word of jobs. What they show they
fetch from the routes, with the key that they ask for."""
RECHECK_S = 5.0
"""A long answer, such as a stream, asks so often whether its key is still good, and ends with the next piece if not."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_KEY = "A key of `posttrain keys create`; a server without keys needs none. GET needs the scope read, all else submit."
_DRAIN_BYTES = 16 * 1024 * 1024


class Gate:
    """Wraps the application.

    Args:
        app: What answers.
        services: The use cases as they are for everybody, once the application runs.
        recheck_s: See RECHECK_S.
    """

    def __init__(self, app: ASGIApp, *, services: Callable[[], Services], recheck_s: float | None = None) -> None:
        self.app = app
        self._services = services
        self._recheck_s = RECHECK_S if recheck_s is None else recheck_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or answer for it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        services = self._services()
        state: dict[str, Any] = scope.setdefault("state", {})
        state["services"] = services
        if is_open(path_of(scope)):
            await self.app(scope, receive, send)
            return
        sent = bearer(Headers(scope=scope))
        try:
            caller = await run_in_threadpool(services.access.caller, sent)
        except ServiceError as error:
            await _drain(receive)
            await service_error_answer(error)(scope, receive, send)
            return
        if caller is None:
            await self.app(scope, receive, send)
            return
        needed = needed_scope(str(scope["method"]))
        if not caller.may(needed):
            await _drain(receive)
            await _too_weak(caller, needed)(scope, receive, send)
            return
        state["services"] = services.access.services(caller)
        answer = _Watched(send, lambda: services.access.caller(sent), self._recheck_s)
        try:
            await self.app(scope, receive, answer.send)
        except KeyRevoked:
            await answer.end()


class KeyRevoked(Exception):
    """The key was revoked while it was being answered to."""


class _Watched:
    """Passes an answer on, and asks from time to time whether its key is still good."""

    def __init__(self, send: Send, ask: Callable[[], object], recheck_s: float) -> None:
        self._send, self._ask, self._recheck_s = send, ask, recheck_s
        self._asked = time.monotonic()
        self._has_length = False

    async def send(self, message: Message) -> None:
        """Pass one message on.

        Raises:
            KeyRevoked: The caller may not see it any more.
        """
        if message["type"] == "http.response.start":
            self._has_length = "content-length" in MutableHeaders(scope=message)
        elif time.monotonic() - self._asked >= self._recheck_s:
            try:
                await run_in_threadpool(self._ask)
            except Unauthorized as error:
                raise KeyRevoked from error
            self._asked = time.monotonic()
        await self._send(message)

    async def end(self) -> None:
        """End the answer; one whose length was announced is left to break off, so that nobody takes it for whole."""
        if not self._has_length:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def describe(app: FastAPI) -> None:
    """Put into the application's description that requests carry a key where the server has any."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema = plain()
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": _KEY}}
        schema["security"] = [{"key": []}, {}]
        for path in OPEN & schema["paths"].keys():
            for operation in schema["paths"][path].values():
                operation["security"] = []
        return schema

    app.openapi = described  # type: ignore[method-assign]


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN or path in (PAGE, PAGE.rstrip("/")) or path.startswith(ASSETS)


def needed_scope(method: str) -> keys.Scope:
    """The scope that a method needs on every path that isn't open."""
    return "read" if method in _READING else "submit"


def bearer(headers: Headers) -> str | None:
    """The key of `Authorization: Bearer KEY`; None without one. Anything else in that header is no key either."""
    given = headers.getlist("authorization")
    scheme, _, key = given[0].strip().partition(" ") if len(given) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def path_of(scope: Scope) -> str:
    """The path as routes know it, without the prefix that a proxy puts before it."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(prefix) if prefix and f"{path}/".startswith(f"{prefix}/") else path


async def _drain(receive: Receive) -> None:
    """Take in some of the body, so that a client that is still sending sees the answer instead of a closed connection."""
    left = _DRAIN_BYTES
    while left > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))


def _too_weak(caller: Caller, needed: keys.Scope) -> Answer:
    return error_answer(
        403,
        f"this key has the scope {caller.scope}, and the request needs {needed}: use a key that was made with --scope {needed}",
        code="scope_insufficient",
        headers={"www-authenticate": f'Bearer realm="posttrain", error="insufficient_scope", scope="{needed}"'},
    )
