"""The service's error tree: a stable code, a sentence, and what the caller may do about it.

No HTTP here: `api/errors.py` alone turns a class into a status. Only standard library, so that everything may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class ServiceError(Exception):
    """Something the service cannot do, said so that the caller knows what to change.

    Attributes:
        code: Stable machine-readable name; the class's own unless a finer one is given.
        message: What is wrong, with which value, and what to do.
        param: Name of the field at fault (dotted path), or None.
        errors: Every single fault, e.g. `{"line", "loc", "message"}` for rows or fields; empty when there is just one.
        retry_after_s: Seconds after which the same request may succeed; None = not known, or never.
        should_retry: Whether the same request may succeed later without a change.
    """

    code: str = "service_error"
    should_retry: ClassVar[bool] = False
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        errors: Sequence[dict[str, Any]] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.errors = [dict(error) for error in errors]
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s


class InvalidRequest(ServiceError):
    """A well-formed request whose content cannot be honoured; `errors` lists every fault."""

    code = "invalid_request"


class UnsupportedMethod(InvalidRequest):
    """A training method that a compatible API has and this service does not."""

    code = "unsupported_method"


class Unauthorized(ServiceError):
    """No credentials, or wrong ones."""

    code = "unauthorized"


class Forbidden(ServiceError):
    """The caller is known and may not do this."""

    code = "forbidden"


class NotFound(ServiceError):
    """No such job, file, model, checkpoint or log."""

    code = "not_found"


class Conflict(ServiceError):
    """The thing is in a state that forbids this, or the name is taken; trying again changes nothing."""

    code = "conflict"


class PayloadTooLarge(ServiceError):
    """More bytes or rows than the server takes."""

    code = "payload_too_large"


class QuotaExceeded(ServiceError):
    """The caller has used up a share; it comes back with time."""

    code = "quota_exceeded"
    should_retry = True
    default_retry_after_s = 60.0


class StoreBusy(ServiceError):
    """The database is locked by somebody else for longer than the busy timeout."""

    code = "store_busy"
    should_retry = True
    default_retry_after_s = 1.0


class Unavailable(ServiceError):
    """A part the request needs isn't working now: the trainer's interpreter, the hub, a loop that is starting."""

    code = "unavailable"
    should_retry = True
    default_retry_after_s = 5.0


class DiskFull(ServiceError):
    """The storage directory has less free space than the request needs on top of the reserve."""

    code = "disk_full"


class LaunchFailed(ServiceError):
    """A run could not be started on this host."""

    code = "launch_failed"


class StoreMismatch(ServiceError):
    """The database's schema is older or newer than this build; `posttrain db upgrade` or a matching build mends it."""

    code = "schema_mismatch"


class InvalidSettings(ServiceError):
    """A setting, or a combination of them, that the service cannot start with."""

    code = "invalid_settings"
