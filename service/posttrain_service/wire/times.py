"""Times on the wire: the native API speaks ISO 8601 in UTC, the OpenAI shapes whole Unix seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def iso(seconds: float | None) -> str | None:
    """Epoch seconds as `2026-01-31T12:00:00.250000Z`; None stays None."""
    if seconds is None:
        return None
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
    return text.removesuffix("+00:00") + "Z"


def unix(seconds: float | None) -> int | None:
    """Epoch seconds as a whole number; None stays None."""
    return None if seconds is None else int(seconds)
