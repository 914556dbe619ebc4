"""The error body of every face: `{"error": {"message", "type", "param", "code"}, "detail"}`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}
_TYPES |= {429: "rate_limit_error"}

_MAX_SHOWN = 60


def error_type(status: int) -> str:
    """The coarse kind of an error, as clients of OpenAI-shaped APIs know it."""
    return "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")


def error_body(
    message: str,
    *,
    status: int,
    code: str,
    param: str | None = None,
    errors: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The envelope; `errors` lists the single faults of a request that has several (lines of data, fields).

    `detail` repeats the message for clients that read only that key.
    """
    error: dict[str, Any] = {"message": message, "type": error_type(status), "param": param, "code": code}
    if errors is not None:
        error["errors"] = [dict(item) for item in errors]
    return {"error": error, "detail": message}


def field_errors(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pydantic's error dicts as `{"loc", "message"}`, locations as dotted paths such as `training.learning_rate`."""
    return [_field_error(item) for item in found]


def summary(errors: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for a list of field errors: the first one, and how many more there are."""
    first = errors[0]
    text = f"{first['loc']}: {first['message']}" if first["loc"] else str(first["message"])
    more = len(errors) - 1
    return text if more < 1 else f"{text} (and {more} more error{'s' if more > 1 else ''}, all in error.errors)"


def _field_error(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(item.get("type", ""))
    location = _path(item.get("loc", ()))
    if kind == "extra_forbidden":
        return {"loc": location, "message": "no such field; check the spelling, or leave it out"}
    if kind == "missing":
        return {"loc": location, "message": "is required" if location else "the request has no body; send JSON"}
    message = str(item.get("msg", "invalid"))
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind not in ("value_error", "assertion_error") and "input" in item:
        message += _shown(item["input"])
    return {"loc": location, "message": message}


def _path(location: Sequence[Any]) -> str:
    """The dotted path, without FastAPI's leading `body`, `query`, `path` or `header`."""
    parts = [str(part) for part in location]
    if parts and parts[0] in ("body", "query", "path", "header"):
        parts = parts[1:]
    return ".".join(parts)


def _shown(value: Any) -> str:
    """The offending value, when it is short enough to help."""
    if not isinstance(value, str | int | float | bool | None):
        return ""
    text = repr(value)
    return f" (got {text})" if len(text) <= _MAX_SHOWN else f" (got {text[: _MAX_SHOWN - 3]}...)"
