"""The error body of every face: `{"error": {"message", "type", "param", "code"}, "detail"}`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain_service.wire.names import real_path
from posttrain_service.wire.suggest import NO_FIELD
from posttrain_trainer.contract.base import Disagreement

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
    request_id: str | None = None,
) -> dict[str, Any]:
    """The envelope; `errors` lists the single faults of a request that has several (lines of data, fields).

    `detail` repeats the message for clients that read only that key.
    """
    error: dict[str, Any] = {"message": message, "type": error_type(status), "param": param, "code": code}
    if errors is not None:
        error["errors"] = [dict(item) for item in errors]
    if request_id is not None:
        error["request_id"] = request_id
    return {"error": error, "detail": message}


def field_errors(
    found: Iterable[Mapping[str, Any]], body: Any = None, name_of: Callable[[str], str] = str
) -> list[dict[str, Any]]:
    """Pydantic's error dicts as `{"loc", "message"}`, locations as dotted paths such as `training.learning_rate`.

    Of a union the branches are told that fit what was sent; their names, which no caller wrote, are left out. Unknown
    fields come before missing ones, since a misspelt name is both.

    Args:
        found: `ValidationError.errors()`.
        body: What was validated; None = unknown, and locations stay as they are.
        name_of: What a path is called where the caller wrote another one.
    """
    faults: list[_Fault] = []
    for item in found:
        fault = _fault_of(item, body, name_of)
        same = next((known for known in faults if known.in_union and fault.in_union and known.path == fault.path), None)
        if same is None:
            faults.append(fault)
        elif same.kind in _BAD_TEXT and fault.kind in _WANTED:
            continue  # text was sent and is bad text: that something else would do as well helps nobody
        elif fault.message not in same.messages:
            same.messages.append(fault.message)
    told = [fault for fault in faults if not (fault.in_union and any(_is_inside(other, fault) for other in faults))]
    told.sort(key=lambda fault: fault.kind == "missing")
    return [{"loc": name_of(".".join(fault.path)), "message": "; or ".join(fault.messages)} for fault in told]


def summary(errors: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for a list of field errors: the first one, and how many more there are."""
    first = errors[0]
    named = not first["loc"] or str(first["message"]).startswith(f"{first['loc']} ")
    text = str(first["message"]) if named else f"{first['loc']}: {first['message']}"
    more = len(errors) - 1
    return text if more < 1 else f"{text} (and {more} more error{'s' if more > 1 else ''}, all in error.errors)"


@dataclass
class _Fault:
    path: list[str]
    message: str
    kind: str
    in_union: bool

    def __post_init__(self) -> None:
        self.messages = [self.message]


def _is_inside(other: _Fault, fault: _Fault) -> bool:
    return len(other.path) > len(fault.path) and other.path[: len(fault.path)] == fault.path


def _fault_of(item: Mapping[str, Any], body: Any, name_of: Callable[[str], str]) -> _Fault:
    kind = str(item.get("type", ""))
    location = list(item.get("loc", ()))
    source = location.pop(0) if location and location[0] in _SOURCES else "body"
    path, in_union = [str(part) for part in location], False
    if body is not None and source == "body":
        path, in_union = real_path(location, body, missing=kind == "missing")
    error = item.get("ctx", {}).get("error")
    if isinstance(error, Disagreement):
        prefix, at_fault = path, error.fields[:1]
        message = error.told(lambda name: name_of(".".join([*prefix, name])))
        return _Fault([*path, *(at_fault[0].split(".") if at_fault else [])], message, kind, in_union)
    return _Fault(path, _message(item, kind, bool(path)), kind, in_union)


_SOURCES = ("body", "query", "path", "header")
"""What FastAPI puts in front of a location."""
_WANTED = {"model_type": "an object", "model_attributes_type": "an object", "dict_type": "an object"}
_WANTED |= {"tuple_type": "a list", "list_type": "a list"}

_BAD_TEXT = frozenset({"string_too_short", "string_too_long", "string_pattern_mismatch"})


def _message(item: Mapping[str, Any], kind: str, has_path: bool) -> str:
    if kind == "extra_forbidden":
        return f"{NO_FIELD}; check the spelling, or leave it out"
    if kind == "missing":
        return "is required" if has_path else "the request has no body; send JSON"
    if kind in ("string_too_short", "too_short") and item.get("input") in ("", [], (), {}):
        return "must not be empty"
    message = f"Input should be {_WANTED[kind]}" if kind in _WANTED else str(item.get("msg", "invalid"))
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind not in ("value_error", "assertion_error") and "input" in item:
        message += _shown(item["input"])
    return message


def _shown(value: Any) -> str:
    """The offending value, when it is short enough to help."""
    if not isinstance(value, str | int | float | bool | None):
        return ""
    text = repr(value)
    return f" (got {text})" if len(text) <= _MAX_SHOWN else f" (got {text[: _MAX_SHOWN - 3]}...)"
