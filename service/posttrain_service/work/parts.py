"""Files handed in by parts: a folder for each upload with its record and its parts, until the file is put together.

No rows: an upload lives for an hour, and its folder is all there is of it. Parts are stored like uploads, durable when
they are answered for; the file is registered under the upload's id as key, so that a repeated completion finds it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from posttrain_service.clock import Clock
from posttrain_service.domain.files import UploadedFile, check_filename, check_purpose, expiry
from posttrain_service.domain.uploads import EXPIRES_AFTER_S, MAX_PART_BYTES, PartedUpload
from posttrain_service.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge, StoreBusy
from posttrain_service.ids import is_part_id, is_upload_id, new_part_id, new_upload_id
from posttrain_service.runs.blobs import Blobs
from posttrain_service.settings import Settings
from posttrain_service.work.uploads import Uploads
from posttrain_trainer.contract.folders import remove_tree
from posttrain_trainer.contract.locks import Lock, LockHeld
from posttrain_trainer.contract.rundir import read_json, write_json

FOLDER = "uploads"
_RECORD = "upload.json"
_LOCK_WAIT_S = 30.0


@dataclass(frozen=True)
class Parts:
    """See `PartService`."""

    settings: Settings
    clock: Clock
    files: Uploads
    sees: str | None = None
    """The owner whose uploads are there; None = everybody's."""

    def create(
        self, *, size_bytes: int, filename: str, purpose: str, mime_type: str, owner: str | None = None,
        expires_after_s: int | None = None,
    ) -> PartedUpload:  # fmt: skip
        """See `PartService.create`."""
        now = self.clock.now()
        check_purpose(purpose)
        expiry(now, expires_after_s)
        if size_bytes > self.settings.max_upload_bytes:
            raise PayloadTooLarge(
                f"the upload has {size_bytes} bytes; the server takes at most {self.settings.max_upload_bytes} "
                "(POSTTRAIN_MAX_UPLOAD_BYTES)",
                param="bytes",
            )
        name = check_filename(filename)
        upload = PartedUpload(
            new_upload_id(), owner or self.files.owner, size_bytes, name, purpose, mime_type, now, expires_after_s=expires_after_s
        )
        self._folder(upload.id).mkdir(parents=True)
        self._write(upload)
        return upload

    def add(self, upload_id: str, source: BinaryIO) -> tuple[str, float]:
        """See `PartService.add`."""
        upload = self._pending(upload_id)
        folder = self._folder(upload_id)
        there = sum(path.stat().st_size for path in folder.glob("file-*"))
        # Parts that a client sent again count too; twice the size is room for that, and still a bound.
        left = min(MAX_PART_BYTES, 2 * upload.size_bytes - there)
        if left <= 0:
            raise PayloadTooLarge(f"upload {upload_id} has got twice the bytes it was announced with", param="data")
        part_id = new_part_id()
        blobs = Blobs(folder, max_bytes=left, reserve_bytes=self.settings.disk_reserve_bytes)
        blobs.save(source, _stored(part_id))
        return part_id, self.clock.now()

    def complete(self, upload_id: str, part_ids: Sequence[str], md5: str | None = None) -> tuple[PartedUpload, UploadedFile]:
        """See `PartService.complete`."""
        with self._locked(upload_id):
            upload = self._read(upload_id)
            if upload.status == "completed" and upload.file_id is not None:
                return upload, self.files.get(upload.file_id)
            upload = self._pending(upload_id)
            paths = [self._part(upload_id, part_id) for part_id in part_ids]
            _check_whole(upload, paths, md5)
            with _Joined(paths) as source:
                file = self.files.create(
                    cast(BinaryIO, source),
                    filename=upload.filename,
                    purpose=upload.purpose,
                    owner=upload.owner,
                    expires_after_s=upload.expires_after_s,
                    idempotency_key=upload.id,
                )
            done = replace(upload, status="completed", file_id=file.id)
            self._write(done)
            self._clear(upload_id)
            return done, file

    def cancel(self, upload_id: str) -> PartedUpload:
        """See `PartService.cancel`."""
        with self._locked(upload_id):
            upload = self._read(upload_id)
            if upload.status == "cancelled":
                return upload
            upload = replace(self._pending(upload_id), status="cancelled")
            self._write(upload)
            self._clear(upload_id)
            return upload

    def status(self, upload: PartedUpload) -> str:
        """See `PartService.status`."""
        return upload.at(self.clock.now())

    def _pending(self, upload_id: str) -> PartedUpload:
        upload = self._read(upload_id)
        status = upload.at(self.clock.now())
        if status != "pending":
            raise Conflict(f"upload {upload_id} is {status}; create another one", code=f"upload_{status}")
        return upload

    def _read(self, upload_id: str) -> PartedUpload:
        record = read_json(self._folder(upload_id) / _RECORD) if is_upload_id(upload_id) else None
        if record is None or self.sees not in (None, record["owner"]):
            raise NotFound(f"there is no upload {upload_id[:140]!r}", code="upload_not_found", param="upload_id")
        return PartedUpload(**record)

    def _write(self, upload: PartedUpload) -> None:
        write_json(self._folder(upload.id) / _RECORD, upload.record())

    def _part(self, upload_id: str, part_id: str) -> Path:
        path = self._folder(upload_id) / _stored(part_id) if is_part_id(part_id) else None
        if path is None or not path.is_file():
            raise InvalidRequest(f"upload {upload_id} has no part {part_id[:140]!r}", code="part_not_found", param="part_ids")
        return path

    def _clear(self, upload_id: str) -> None:
        for path in self._folder(upload_id).glob("file-*"):
            path.unlink(missing_ok=True)

    def _folder(self, upload_id: str) -> Path:
        return self.settings.storage_dir / FOLDER / upload_id

    @contextmanager
    def _locked(self, upload_id: str) -> Iterator[None]:
        """One completion or cancellation at a time, over all server processes."""
        self._read(upload_id)
        try:
            lock = Lock(self._folder(upload_id) / "lock", wait_s=_LOCK_WAIT_S)
        except LockHeld as error:
            raise StoreBusy(f"upload {upload_id} is being completed; try again") from error
        try:
            yield
        finally:
            lock.release()


def sweep(settings: Settings, now: float) -> list[str]:
    """Remove the folders of uploads whose time is over; their ids."""
    removed = []
    folder = settings.storage_dir / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_upload_id(path.name) and now - path.stat().st_mtime >= 2 * EXPIRES_AFTER_S:
            remove_tree(path)
            removed.append(path.name)
    return removed


def _stored(part_id: str) -> str:
    """The name of a part's file."""
    return "file-" + part_id.removeprefix("part_")


def _check_whole(upload: PartedUpload, paths: Sequence[Path], md5: str | None) -> None:
    if len(set(paths)) < len(paths):
        raise InvalidRequest("part_ids names a part twice", param="part_ids")
    size = sum(path.stat().st_size for path in paths)
    if size != upload.size_bytes:
        raise InvalidRequest(
            f"the parts have {size} bytes together, but the upload was announced with {upload.size_bytes}",
            code="upload_size_mismatch",
            param="part_ids",
        )
    if md5 is None:
        return
    digest = hashlib.md5(usedforsecurity=False)
    with _Joined(paths) as source:
        while data := source.read(1 << 20):
            digest.update(data)
    if digest.hexdigest() != md5.lower():
        raise InvalidRequest(
            f"the parts together have the md5 {digest.hexdigest()}, not {md5[:64]}", code="upload_md5_mismatch", param="md5"
        )


class _Joined:
    """Files read one after the other, as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._rest = list(paths)
        self._file: BinaryIO = io.BytesIO()

    def __enter__(self) -> _Joined:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; b"" at the end of the last file."""
        while not (data := self._file.read(size)) and self._rest:
            self._file.close()
            self._file = self._rest.pop(0).open("rb")
        return data
