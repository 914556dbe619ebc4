"""The server's own log lines: text for people or JSON for collectors, with the request's and job's id on each line."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

_KEY = re.compile(r"(pt_[0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_context: ContextVar[dict[str, str] | None] = ContextVar("posttrain_log_context", default=None)


@contextmanager
def log_context(**values: str) -> Iterator[None]:
    """Put `values` (e.g. job=..., request=...) on every line that is logged inside, in this task or thread."""
    token = _context.set({**(_context.get() or {}), **values})
    try:
        yield
    finally:
        _context.reset(token)


def add_context(**values: str) -> None:
    """Put `values` on every line that is logged from now on in this task and in what it starts: for what is known late."""
    _context.set({**(_context.get() or {}), **values})


def context_value(name: str) -> str | None:
    """What stands on the lines that are logged here under this name."""
    return (_context.get() or {}).get(name)


def fields(**values: object) -> dict[str, Any]:
    """For a log call's `extra`: values that stand beside the message in JSON; text lines leave them out."""
    return {"posttrain_fields": values}


def set_up_logging(form: Literal["text", "json"] = "text", level: str = "info") -> None:
    """Send the service's, uvicorn's and the trace exporter's log lines to standard error in one form; calling it again replaces the set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("posttrain_service", "uvicorn", "alembic", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for name in ("uvicorn.error", "uvicorn.access"):  # they speak through "uvicorn"
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = True
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)  # the edge tells of each request, with more of it


class TextFormatter(logging.Formatter):
    """`2024-05-01T12:00:00.123Z INFO module: message [job=...]`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it when there is one. Control characters are escaped."""
        message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        extra = "".join(f" [{key}={value}]" for key, value in (_context.get() or {}).items())
        line = f"{_time(record)} {record.levelname} {record.name.removeprefix('posttrain_service.')}: {message}{extra}"
        return without_keys(f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the context's values and the line's own, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        own: Mapping[str, object] = getattr(record, "posttrain_fields", {})
        data: dict[str, object] = {
            **(_context.get() or {}),
            **{name: value for name, value in own.items() if _is_plain(value)},
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            data["traceback"] = self.formatException(record.exc_info)
        return without_keys(json.dumps(data, ensure_ascii=False))


def _is_plain(value: object) -> bool:
    """Whether JSON has the value; None is left out."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def without_keys(text: str) -> str:
    """The text with the secret part of every API key left out, wherever somebody may have put one, such as in a URL."""
    return _KEY.sub(r"\1_...", text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
