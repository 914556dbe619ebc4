"""`PartedUpload`: a file that is handed in by parts, as a value, and its rules. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

UploadStatus = Literal["pending", "completed", "cancelled", "expired"]

EXPIRES_AFTER_S = 3600.0
"""An upload that isn't completed so long after its creation is removed."""
MAX_PART_BYTES = 64 * 1024 * 1024
"""Largest part."""


@dataclass(frozen=True)
class PartedUpload:
    """An upload by parts at one moment."""

    id: str
    """`upload_` and 32 hex digits; also the name of its folder."""
    owner: str
    """Who may see it."""
    size_bytes: int
    """Size of the whole file, as announced."""
    filename: str
    """Its name at the sender."""
    purpose: str
    """What the file is for."""
    mime_type: str
    """As the sender says."""
    created_at: float
    """When it began."""
    status: UploadStatus = "pending"
    """Where it is."""
    file_id: str | None = None
    """Once completed: the file."""
    expires_after_s: int | None = None
    """Seconds from its completion to the file's own expiry."""

    @property
    def expires_at(self) -> float:
        """When it can't be completed any more."""
        return self.created_at + EXPIRES_AFTER_S

    def at(self, now: float) -> UploadStatus:
        """Its status at `now`."""
        return "expired" if self.status == "pending" and now >= self.expires_at else self.status

    def record(self) -> dict[str, Any]:
        """As it is written to disk."""
        return dict(self.__dict__)
