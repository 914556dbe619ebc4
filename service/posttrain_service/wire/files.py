"""OpenAI's File object, its list, and what an upload's form may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.times import unix
from posttrain_service.wire.views import PageSeen

if TYPE_CHECKING:
    from posttrain_service.domain.files import UploadedFile

_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


def file_json(file: UploadedFile) -> dict[str, Any]:
    """The File object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": unix(file.created_at),
        "expires_at": unix(file.expires_at),
        "filename": file.filename,
        "purpose": str(file.purpose),
        "status": "processed",
        "status_details": None,
    }


def file_page_json(page: PageSeen[UploadedFile]) -> dict[str, Any]:
    """A list in OpenAI's shape; clients page by `after` = the last id."""
    return {
        "object": "list",
        "data": [file_json(file) for file in page.data],
        "has_more": page.has_more,
        "first_id": page.first_id,
        "last_id": page.last_id,
    }


def deleted_json(file_id: str) -> dict[str, Any]:
    """The answer to a deletion."""
    return {"id": file_id, "object": "file", "deleted": True}


def purpose(form: Mapping[str, str]) -> str:
    """The form's purpose.

    Raises:
        InvalidRequest: It is missing, or the form has a field that nothing would be done with.
    """
    for name in form:
        if name not in _FIELDS:
            raise InvalidRequest(f"{name}: no such field; an upload has file, purpose and expires_after", param=name)
    if not form.get("purpose"):
        raise InvalidRequest("purpose is required; for training rows it is 'fine-tune'", param="purpose")
    return form["purpose"]


def expires_after_s(form: Mapping[str, str]) -> int | None:
    """Seconds from the upload to its expiry; None when the form asks for none.

    Raises:
        InvalidRequest: The anchor is not created_at, or the seconds are not a whole number.
    """
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"expires_after.anchor must be 'created_at', not {anchor!r}", param="expires_after.anchor")
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 10:
        raise InvalidRequest(
            f"expires_after.seconds must be a whole number, not {seconds!r}", param="expires_after.seconds"
        )
    return int(seconds)
