"""Response shapes of /v1/files, and the upload's form, as they stand in openapi.yaml."""

from __future__ import annotations

from typing import Any, Literal

from posttrain_service.wire.shapes import Listing, Shape


class File(Shape):
    """OpenAI's File object."""

    id: str
    """file-..."""
    object: Literal["file"]
    """file."""
    bytes: int
    """Its size."""
    created_at: int
    """Unix seconds."""
    expires_at: int | None
    """Unix seconds."""
    filename: str
    """Its name at the sender."""
    purpose: str
    """What it is for."""
    status: Literal["uploaded", "processed", "error"]
    """processed: it can be used."""
    status_details: str | None
    """Always null."""


class FileDeleted(Shape):
    """A file is gone."""

    id: str
    """Its id."""
    object: Literal["file"]
    """file."""
    deleted: bool
    """True."""


class FileList(Listing):
    """Files."""

    object: Literal["list"]
    """list."""
    data: list[File]
    """Newest first, unless told."""


UPLOAD_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "purpose": {"type": "string", "enum": ["fine-tune"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    "file": {"type": "string", "format": "binary"},
                },
            }
        }
    },
}
"""The form of an upload; read as it arrives, so FastAPI doesn't know it."""
