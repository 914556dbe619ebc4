"""A data file on the trainer's side: what identifies its content, and its rows in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from posttrain_trainer.contract.errors import InvalidData
from posttrain_trainer.contract.rows import ParsedRow, iter_rows

CHUNK_ROWS = 256
"""Rows that are tokenised in one call."""


def fingerprint(path: Path) -> str:
    """SHA-256 of the file's bytes, with the ending that tells how to read them.

    Raises:
        InvalidData: There is no such file, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise InvalidData(f"data file {path} cannot be read: {error.strerror}; check data_path") from error
    content.update("".join(path.suffixes[-2:]).lower().encode())
    return content.hexdigest()


def row_chunks(path: Path, size: int = CHUNK_ROWS) -> Iterator[list[ParsedRow]]:
    """The rows of a file, which must be conversations, `size` at a time; bad ones carry their error."""
    rows = iter_rows(path, kind="conversation")
    while chunk := list(islice(rows, size)):
        yield chunk
