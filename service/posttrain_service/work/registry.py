"""Data sets under names of their own: registered from rows or an address, listed, read row by row, unregistered.

The rows of each are an uploaded file like any other, so quotas, owners, retention and jobs treat them alike.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain_service.clock import Clock
from posttrain_service.domain.files import UPLOAD_PURPOSES
from posttrain_service.domain.registered import RegisteredSet, check_dataset_id, file_path, parse_data, refuse_scheme
from posttrain_service.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work.uploads import Uploads
from posttrain_trainer.contract.plainfile import NotPlain, open_plain
from posttrain_trainer.contract.rowfile import RawRow, read_rows

FOLDER = "datasets"
"""Folder below the storage directory that `file:` addresses name files in."""
MAX_ROWS = 100_000
"""Most rows of one answer."""
_SHOWN_ERRORS = 20
Bytes = io.BytesIO | io.BufferedReader


@dataclass(frozen=True)
class Rows:
    """A piece of a data set."""

    data: Sequence[Mapping[str, Any]]
    has_more: bool


@dataclass(frozen=True)
class Registry:
    """See `RegistryService`."""

    settings: Settings
    store: Store
    clock: Clock
    uploads: Uploads

    def register(
        self, *, purpose: str, source: Mapping[str, Any], metadata: Mapping[str, Any], dataset_id: str | None = None
    ) -> RegisteredSet:
        """See `RegistryService.register`."""
        name = f"dataset-{uuid.uuid4().hex}" if dataset_id is None else check_dataset_id(dataset_id)
        told = {key: value for key, value in source.items() if key != "rows"}
        with self._open(source) as (suffix, content):
            if not content.read(1):
                raise _no_rows()
            content.seek(0)
            if dataset_id is not None and (known := self._known(name, purpose, told, metadata, content)) is not None:
                return known
            stem = name.replace("/", "-")[:200]
            file = self.uploads.create(content, filename=f"{stem}{suffix}", purpose=UPLOAD_PURPOSES[0])
        made = RegisteredSet(name, file.owner, purpose, told, file.id, self.clock.now(), dict(metadata))
        try:
            self._check_rows(made)
            self.store.datasets.insert(made)
        except BaseException:
            if self.store.datasets.get(name) != made:  # a lost answer may hide that it was stored
                self.uploads.delete(file.id)
            raise
        return made

    def get(self, dataset_id: str) -> RegisteredSet:
        """See `RegistryService.get`."""
        found = self.store.datasets.get(dataset_id)
        if found is None:
            raise NotFound(f"there is no data set {dataset_id[:140]!r}", code="dataset_not_found", param="dataset_id")
        return found

    def all(self) -> list[RegisteredSet]:
        """See `RegistryService.all`."""
        return self.store.datasets.all()

    def unregister(self, dataset_id: str) -> None:
        """See `RegistryService.unregister`."""
        if self.store.datasets.delete(dataset_id) is None:
            self.get(dataset_id)

    def rows(self, dataset_id: str, *, start: int = 0, limit: int | None = None) -> Rows:
        """See `RegistryService.rows`."""
        most = MAX_ROWS if limit is None else min(limit, MAX_ROWS)
        found = list(islice(self._read(self.get(dataset_id)), start, start + most + 1))
        return Rows([row.value for row in found[:most]], has_more=len(found) > most)

    def _read(self, registered: RegisteredSet) -> Iterator[RawRow]:
        path, file = self.uploads.content(registered.file_id)
        return read_rows(path, name=file.filename, max_bytes=16 * self.settings.max_upload_bytes)

    def _check_rows(self, registered: RegisteredSet) -> None:
        """See that the file holds rows that can be read; what they mean is a job's concern.

        Raises:
            InvalidRequest: It doesn't, with the lines at fault.
        """
        faults: list[dict[str, Any]] = []
        count = bad = 0
        for row in self._read(registered):
            count += 1
            fault = row.error or (None if isinstance(row.value, dict) else "must be an object with named fields")
            bad += fault is not None
            if fault is not None and len(faults) < _SHOWN_ERRORS:
                faults.append({"line": row.line, "loc": f"line {row.line}", "message": fault})
        if count == 0:
            raise _no_rows()
        if bad:
            first = faults[0]
            raise InvalidRequest(
                f"source: {bad} of {count} rows cannot be read; line {first['line']}: {first['message']}",
                code="invalid_data", param="source", errors=faults,
            )  # fmt: skip

    def _known(
        self, name: str, purpose: str, source: Mapping[str, Any], metadata: Mapping[str, Any], content: Bytes
    ) -> RegisteredSet | None:
        """The data set that the same request made before.

        Raises:
            Conflict: The name is taken by another data set.
        """
        known = self.store.datasets.get(name)
        if known is None:
            return None
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        content.seek(0)
        same = (known.purpose, known.source, known.metadata) == (purpose, dict(source), dict(metadata))
        if same and self.uploads.get(known.file_id).sha256 == digest:
            return known
        raise Conflict(
            f"dataset_id {name!r} is taken by another data set; unregister it first, or choose another name",
            code="dataset_exists",
            param="dataset_id",
        )

    @contextmanager
    def _open(self, source: Mapping[str, Any]) -> Iterator[tuple[str, Bytes]]:
        """The rows of a source as a file: its ending, and its bytes to be read."""
        if source["type"] == "rows":
            rows = source["rows"]
            if len(rows) > self.settings.max_rows_inline:
                raise PayloadTooLarge(
                    f"{len(rows)} inline rows are more than the {self.settings.max_rows_inline} that a request may hold",
                    param="source.rows",
                )
            yield ".jsonl", io.BytesIO(_jsonl(rows))
            return
        uri = str(source["uri"])
        if uri.startswith("data:"):
            suffix, data = parse_data(uri)
            yield suffix, io.BytesIO(data)
            return
        if not uri.startswith("file:"):
            raise refuse_scheme(uri)
        path = self._inside(file_path(uri))
        try:
            descriptor = open_plain(path)
        except (OSError, NotPlain) as error:
            raise _no_file(uri) from error
        with os.fdopen(descriptor, "rb") as content:
            yield "".join(path.suffixes[-2:]), content

    def _inside(self, path: str) -> Path:
        """The file that a `file:` address leads to, which must lie in the data sets' folder, also behind links."""
        folder = (self.settings.storage_dir / FOLDER).resolve()
        found = (folder / PurePosixPath(path)).resolve()
        if not found.is_relative_to(folder):
            raise _no_file(path)
        return found


def _jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        return b"".join(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows)
    except ValueError as error:  # NaN, infinities, lone surrogates: not JSON in UTF-8
        raise InvalidRequest(f"source.rows cannot be written as JSON in UTF-8: {error}", param="source.rows") from error


def _no_rows() -> InvalidRequest:
    return InvalidRequest("source: it holds no rows", code="invalid_data", param="source")


def _no_file(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"source.uri {name[:140]!r} names no file below the folder `{FOLDER}` of the server's storage directory",
        code="invalid_dataset_source",
        param="source.uri",
    )
