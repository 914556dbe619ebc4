"""The layer that makes a span of each request, where traces are on."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain_service.api.measure import template_of
from posttrain_service.logs import add_context
from posttrain_service.traces import Traces, current

UNTRACED = ("/health/live", "/health/ready", "/metrics")
"""What machines ask all the time."""


class Trace:
    """Wraps the application; plain ASGI, so that streams pass through unbuffered.

    Args:
        app: What answers.
        traces: Makes spans, once the application runs; None = nobody asked for them.
    """

    def __init__(self, app: ASGIApp, *, traces: Callable[[], Traces | None]) -> None:
        self.app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        traces = self._traces() if scope["type"] == "http" and not scope["path"].endswith(UNTRACED) else None
        if traces is None:
            await self.app(scope, receive, send)
            return
        method = str(scope["method"])
        with traces.request(method, Headers(scope=scope)) as span:
            add_context(trace=(current() or "").split("-")[1])

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route, status = template_of(scope), int(message["status"])
                    span.update_name(f"{method} {route}" if route else method)
                    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
                    for name in ("job_uuid", "job_id"):
                        if name in scope.get("path_params", {}):
                            span.set_attribute("posttrain.job_uuid", str(scope["path_params"][name]))
                await send(message)

            await self.app(scope, receive, noted)
