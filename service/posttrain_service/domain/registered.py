"""`RegisteredSet`: a data set under a name of its own, as a value, and the rules for its name and its address. Pure."""

from __future__ import annotations

import base64
import binascii
import unicodedata
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from posttrain_service.errors import InvalidRequest
from posttrain_service.ids import is_file_id

MAX_ID_LENGTH = 200
_SUFFIXES = {
    "application/json": ".json",
    "application/jsonl": ".jsonl",
    "application/jsonlines": ".jsonl",
    "application/x-jsonlines": ".jsonl",
    "application/x-ndjson": ".jsonl",
    "application/vnd.apache.parquet": ".parquet",
    "text/csv": ".csv",
    "text/tab-separated-values": ".tsv",
}
"""Endings of files by the media type that a `data:` address names."""


@dataclass(frozen=True)
class RegisteredSet:
    """A data set that somebody registered; its rows are an uploaded file."""

    dataset_id: str
    """Its name, one for the whole server."""
    owner: str
    """Who may see it."""
    purpose: str
    """What its owner says it is for."""
    source: dict[str, Any]
    """Where its rows came from: `{"type": "rows"}`, or `{"type": "uri", "uri"}`."""
    file_id: str
    """The file that its rows are kept in."""
    created_at: float
    """When it was registered (epoch seconds)."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Its owner's notes."""


def check_dataset_id(text: str) -> str:
    """A data set's name, unchanged.

    Raises:
        InvalidRequest: It is empty, too long, cannot be shown, or has the form of a file's id.
    """
    shown = not any(unicodedata.category(char) in ("Cc", "Cs") for char in text)
    if not 0 < len(text) <= MAX_ID_LENGTH or not shown or is_file_id(text):
        raise InvalidRequest(
            f"dataset_id {text[:140]!r} is not allowed: 1 to {MAX_ID_LENGTH} characters without controls, not of the form of a "
            "file's id",
            code="invalid_dataset_id",
            param="dataset_id",
        )
    return text


def parse_data(uri: str) -> tuple[str, bytes]:
    """The ending of a file of that kind, and the bytes, of a `data:` address (RFC 2397).

    Raises:
        InvalidRequest: It is malformed, or of a media type that holds no rows.
    """
    head, comma, content = uri.removeprefix("data:").partition(",")
    media, *parameters = (part.strip().lower() for part in head.split(";"))
    suffix = _SUFFIXES.get(media)
    if not comma or suffix is None:
        known = ", ".join(sorted(_SUFFIXES))
        raise _bad(f"a data: address of rows names one of the media types {known} before its comma, not {media[:100]!r}")
    if "base64" not in parameters:
        return suffix, unquote_to_bytes(content)
    try:
        return suffix, base64.b64decode(unquote(content), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(f"what follows base64, is not base64: {error}") from error


def file_path(uri: str) -> str:
    """The path that a `file:` address names.

    Raises:
        InvalidRequest: The address names another machine, or no path.
    """
    parts = urlsplit(uri)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not path or "\x00" in path:
        raise _bad("give file:NAME, with NAME below the folder `datasets` of the server's storage directory")
    return path


def refuse_scheme(uri: str) -> InvalidRequest:
    """The error for an address of a kind that is not fetched."""
    scheme = uri.split(":", 1)[0][:40]
    return _bad(
        f"{scheme!r} addresses are not fetched by this server: give the rows as source type 'rows', as a data: address, or as "
        "file:NAME below the folder `datasets` of its storage directory"
    )


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(f"source.uri: {message}", code="invalid_dataset_source", param="source.uri")
