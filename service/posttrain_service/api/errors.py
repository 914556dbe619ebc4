"""Exceptions to answers: which status each error has, and the envelope for whatever else can go wrong in a route."""

from __future__ import annotations

import math
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from posttrain_service import errors
from posttrain_service.api.answers import Answer, error_answer
from posttrain_service.wire.errors import field_errors, summary
from posttrain_service.wire.suggest import with_suggestions

_STATUS: dict[type[errors.ServiceError], int] = {
    errors.InvalidRequest: 422,
    errors.UnsupportedMethod: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.PayloadTooLarge: 413,
    errors.QuotaExceeded: 429,
    errors.StoreBusy: 503,
    errors.Unavailable: 503,
    errors.StoreMismatch: 503,
    errors.DiskFull: 507,
}

_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
_CODES |= {415: "unsupported_media_type", 416: "range_not_satisfiable"}


def install(app: FastAPI) -> None:
    """Answer every exception of a route in the envelope."""
    app.add_exception_handler(errors.ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


def status_of(error: errors.ServiceError) -> int:
    """The status of an error's class; 500 for one that says nothing about whose fault it is."""
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls]
    return 500


def service_error_answer(error: errors.ServiceError) -> Answer:
    """The answer to an error of the service."""
    headers = {}
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="posttrain"'
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return error_answer(
        status_of(error),
        error.message,
        code=error.code,
        param=error.param,
        errors=error.errors or None,
        headers=headers,
        retry=error.should_retry,
    )


def _service_error(request: Request, error: Exception) -> Answer:
    assert isinstance(error, errors.ServiceError)
    return service_error_answer(error)


def _validation_error(request: Request, error: Exception) -> Answer:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    for item in found:
        if item.get("type") == "json_invalid":
            reason = item.get("ctx", {}).get("error", "invalid JSON")
            return error_answer(400, f"the body is not JSON: {reason}", code="invalid_json")
    body = getattr(request.scope.get("route"), "body_field", None)
    faults = with_suggestions(field_errors(found, error.body), None if body is None else body.field_info.annotation)
    return error_answer(422, summary(faults), code="invalid_request", param=faults[0]["loc"] or None, errors=faults)


def _http_error(request: Request, error: Exception) -> Answer:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = str(error.detail)
    if status == 400 and isinstance(error.__cause__, RecursionError | ValueError):  # FastAPI could not read the body
        return error_answer(400, f"the body is not JSON that can be read: {_reason(error.__cause__)}", code="invalid_json")
    if status == 404 and message == HTTPStatus.NOT_FOUND.phrase:
        message = f"there is no {request.method} {_shown(request.url.path)}; the routes are listed at /openapi.json"
    elif status == 405:
        message = f"{request.method} is not possible on {_shown(request.url.path)}"
    code = _CODES.get(status, HTTPStatus(status).phrase.lower().replace(" ", "_"))
    return error_answer(status, message, code=code, headers=error.headers)


def _reason(cause: BaseException) -> str:
    if isinstance(cause, RecursionError):
        return "it is nested too deeply"
    if isinstance(cause, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {cause.start})"
    return "it has a number with too many digits" if "integer string conversion" in str(cause) else str(cause)[:200]


def _shown(path: str) -> str:
    return path if len(path) <= 200 else path[:197] + "..."
