"""`UploadedFile`: one row of the file list as a value, and the rules for names and purposes."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from typing import Any

from posttrain_service.errors import InvalidRequest

PURPOSES = ("fine-tune", "fine-tune-results")
"""What a file may be for; only the first can be uploaded, the second the service makes."""
UPLOAD_PURPOSES = ("fine-tune",)
MIN_EXPIRES_AFTER_S = 3600
MAX_EXPIRES_AFTER_S = 30 * 86400

_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of what draws nothing: controls, marks of direction and format, half characters, ends of lines."""
_JOINERS = "\u200c\u200d"  # which some scripts, and emojis, cannot be written without


@dataclass(frozen=True)
class UploadedFile:
    """A file that somebody handed in, or that the service made."""

    id: str
    """`file-` and 32 hex digits; also its name in the files folder."""
    owner: str
    """Who may see it; "default" without authentication."""
    filename: str
    """The name it had at the sender, for people only: never a path here."""
    purpose: str
    """One of PURPOSES."""
    size_bytes: int
    """Its size."""
    sha256: str
    """Its SHA-256, in hex."""
    created_at: float
    """When it was complete."""
    expires_at: float | None = None
    """When it is removed; None = kept until it is deleted."""
    report: dict[str, Any] = field(default_factory=dict)
    """What a look at its rows found (rows, format, errors); empty when nobody looked."""


def check_filename(filename: str) -> str:
    """The last part of the name a client sent, fit to be shown.

    Raises:
        InvalidRequest: Nothing usable is left of it.
    """
    last = filename.replace("\\", "/").rsplit("/", 1)[-1]
    name = "".join(char for char in last if char in _JOINERS or unicodedata.category(char) not in _UNSHOWN).strip()
    if not name or name in (".", "..") or len(name) > 255:
        raise InvalidRequest(
            f"file name {filename[:80]!r} is not allowed: 1 to 255 characters that can be shown",
            code="invalid_filename",
            param="file",
        )
    return name


def check_purpose(purpose: str) -> str:
    """The purpose of an upload, unchanged.

    Raises:
        InvalidRequest: Files for that purpose aren't taken.
    """
    if purpose not in UPLOAD_PURPOSES:
        allowed = ", ".join(repr(name) for name in UPLOAD_PURPOSES)
        raise InvalidRequest(
            f"purpose {purpose[:80]!r} is not supported: use {allowed}", code="invalid_purpose", param="purpose"
        )
    return purpose


def expiry(now: float, expires_after_s: int | None) -> float | None:
    """When a file expires that was created at `now`.

    Raises:
        InvalidRequest: The time span is outside an hour to 30 days.
    """
    if expires_after_s is None:
        return None
    if not MIN_EXPIRES_AFTER_S <= expires_after_s <= MAX_EXPIRES_AFTER_S:
        raise InvalidRequest(
            f"expires_after seconds {expires_after_s} is outside {MIN_EXPIRES_AFTER_S} to {MAX_EXPIRES_AFTER_S}",
            code="invalid_expires_after",
            param="expires_after.seconds",
        )
    return now + expires_after_s
