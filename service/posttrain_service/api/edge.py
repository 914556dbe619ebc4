"""The layer around the application: a request id on every answer and every log line, a line for each request, the guard
against foreign web pages, and the last catch.

Plain ASGI, so that streams pass through unbuffered.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain_service.api.answers import Answer, error_answer
from posttrain_service.ids import new_request_id
from posttrain_service.logs import fields, log_context

logger = logging.getLogger(__name__)
access = logging.getLogger("posttrain_service.api.access")

REQUEST_ID = "x-request-id"
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Largest body of a request that isn't an upload; larger data sets are uploaded as files."""

_ASKED_OFTEN = ("/health/live", "/health/ready", "/metrics")

_SENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Edge:
    """Wraps the application.

    Args:
        app: What answers.
        loopback: The service listens on a loopback address only. A web page that the user visits could then reach it
            through the user's browser: directly (a foreign Origin), or under a name of its own that resolves to
            127.0.0.1 (DNS rebinding, a foreign Host). Both are refused.
        root_path: Prefix under which a proxy shows the application, whether or not the proxy takes it off.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, root_path: str = "") -> None:
        self.app = app
        self.loopback = loopback
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.root_path:
            scope["root_path"] = self.root_path
        headers = Headers(scope=scope)
        sent = headers.get(REQUEST_ID, "")
        request_id = sent if _SENT_ID.fullmatch(sent) else new_request_id()
        status = 0
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _mark(message, request_id)
            await send(message)

        with log_context(request=request_id):
            try:
                await self._answer(scope, headers, receive, send_with_id, request_id, lambda: status != 0)
            finally:
                _tell(scope, status, time.monotonic() - began)

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, send: Send, request_id: str, has_begun: Callable[[], bool]
    ) -> None:
        refusal = _foreign(headers) if self.loopback else None
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        try:
            await self.app(scope, _capped(scope, headers, receive), send)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun():
                raise
            answer = error_answer(
                500,
                f"the server failed on this request; its log has the reason under {request_id}",
                code="internal_error",
            )
            await answer(scope, receive, send)


def is_loopback_host(host: str) -> bool:
    """Whether a host name or address without port is this machine's loopback: localhost, 127.0.0.0/8, ::1."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _foreign(headers: Headers) -> Answer | None:
    host = _host_of(f"//{headers.get('host', '')}")
    if not is_loopback_host(host):
        return error_answer(
            403,
            f"host {host[:100]!r} is not this server's: it listens on the loopback only, so call it as 127.0.0.1 or localhost",
            code="foreign_host",
        )
    origin = headers.get("origin")
    if origin is not None and not is_loopback_host(_host_of(origin)):
        return error_answer(403, f"requests from web pages of {origin[:100]!r} are not accepted", code="foreign_origin")
    return None


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _tell(scope: Scope, status: int, seconds: float) -> None:
    """One line for the request; those that machines ask all the time only where it is debugged, or they went wrong."""
    method, path = str(scope["method"]), str(scope["path"])
    ids = scope.get("path_params", {})
    told = fields(
        method=method, path=path, route=getattr(scope.get("route"), "path", None), status=status or None,
        duration_ms=round(1000 * seconds, 1), client=(scope.get("client") or (None,))[0], job=ids.get("job_uuid") or ids.get("job_id"),
    )  # fmt: skip
    level = logging.DEBUG if path.endswith(_ASKED_OFTEN) and 0 < status < 400 else logging.INFO
    how = str(status) if status else "left by its caller"
    access.log(level, "%s %s: %s in %.1f ms", method, path, how, 1000 * seconds, extra=told)


def _mark(message: MutableMapping[str, Any], request_id: str) -> None:
    headers = MutableHeaders(scope=message)
    headers[REQUEST_ID] = request_id
    headers.setdefault("x-content-type-options", "nosniff")


def _capped(scope: Scope, headers: Headers, receive: Receive) -> Receive:
    """`receive` that refuses a body beyond MAX_JSON_BYTES; uploads are capped where they are received."""
    if headers.get("content-type", "").lower().startswith("multipart/"):
        return receive
    seen = 0

    async def capped() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_JSON_BYTES:
            raise HTTPException(
                413, f"the body is larger than {MAX_JSON_BYTES} bytes; upload the rows by POST /v1/files"
            )
        return message

    return capped
