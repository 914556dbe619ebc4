"""The response class of every JSON answer, and the error answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from posttrain_service.logs import context_value
from posttrain_service.wire.errors import error_body
from posttrain_service.wire.text import to_json

SHOULD_RETRY = "x-should-retry"
"""Header that tells OpenAI-shaped clients whether trying again makes sense; they would retry 409 and 5xx otherwise."""


class Answer(JSONResponse):
    """JSON as `wire.text` writes it: null for numbers that are not finite."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return to_json(content).encode("utf-8")


def error_answer(
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    errors: Sequence[Mapping[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
    retry: bool = False,
) -> Answer:
    """An error in the envelope of every face, with the id under which the server's log has the request."""
    body = error_body(message, status=status, code=code, param=param, errors=errors, request_id=context_value("request"))
    return Answer(body, status, {SHOULD_RETRY: "true" if retry else "false", **(headers or {})})
