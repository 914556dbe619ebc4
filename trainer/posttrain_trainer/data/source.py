"""A data file on the trainer's side: what identifies its content, and its rows in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from posttrain_trainer.contract.conversation import Kind, TrainOn
from posttrain_trainer.contract.errors import InvalidData
from posttrain_trainer.contract.methods import Method, PretrainMethod
from posttrain_trainer.contract.rowreport import ParsedRow
from posttrain_trainer.contract.rows import iter_rows

CHUNK_ROWS = 256
"""Rows that are tokenised in one call."""

KINDS: dict[str, Kind] = {"sft": "conversation", "dpo": "preference", "pretrain": "document"}
"""What rows must mean for each method."""


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


def row_chunks(path: Path, method: Method, train_on: TrainOn, size: int = CHUNK_ROWS) -> Iterator[list[ParsedRow]]:
    """The rows of a file, which must be of the method's kind, `size` at a time; bad ones carry their error.

    Bad are also those from which nothing can be learned, by `train_on` and what their turns say themselves.
    """
    column = method.text_column if isinstance(method, PretrainMethod) and method.text_column != "auto" else None
    rows = iter_rows(path, kind=KINDS[method.kind], text_column=column, train_on=train_on)
    while chunk := list(islice(rows, size)):
        yield chunk
