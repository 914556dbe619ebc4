"""Uploaded bytes on disk: streamed in, hashed, size-capped, moved into place in one step, deleted.

A blob is named by its file id alone; names that clients choose never touch a path. A row of the file list is written
after its blob and removed before it, so a crash leaves at most a blob without a row, which `leftovers` finds.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from posttrain_service.errors import DiskFull, InvalidRequest, PayloadTooLarge
from posttrain_service.ids import is_file_id
from posttrain_trainer.contract.rundir import sync_folder

_CHUNK_BYTES = 1 << 20
_CHECK_EVERY_BYTES = 64 << 20
_PART = ".part"


@dataclass(frozen=True)
class Blob:
    """A stored upload."""

    file_id: str
    path: Path
    size_bytes: int
    sha256: str


class Blobs:
    """The folder of uploads.

    Args:
        folder: `<storage>/files`; made when it isn't there.
        max_bytes: Largest upload.
        reserve_bytes: Free disk space that uploads must leave.
    """

    def __init__(self, folder: Path, *, max_bytes: int, reserve_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def save(self, source: BinaryIO, file_id: str) -> Blob:
        """Store everything that `source` gives, in constant memory; durable when this returns.

        Raises:
            PayloadTooLarge: There are more than `max_bytes`.
            InvalidRequest: There are none.
            DiskFull: They would eat into the reserve, or the disk is full.
        """
        path = self.path(file_id)
        part = self._folder / f".{file_id}{_PART}"
        try:
            size_bytes, sha256 = self._receive(source, part)
            if size_bytes == 0:
                raise InvalidRequest("the file is empty", code="empty_file", param="file")
            part.replace(path)
            sync_folder(self._folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._full() from error
        finally:
            part.unlink(missing_ok=True)
        return Blob(file_id, path, size_bytes, sha256)

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are, or would be.

        Raises:
            ValueError: `file_id` is no file id, so it must not become a path.
        """
        if not is_file_id(file_id):
            raise ValueError(f"{file_id[:80]!r} is no file id")
        return self._folder / file_id

    def delete(self, file_id: str) -> bool:
        """Remove the bytes of a file; False when there were none."""
        try:
            self.path(file_id).unlink()
        except FileNotFoundError:
            return False
        return True

    def leftovers(self, now: float, age_s: float) -> Iterator[str]:
        """Ids of blobs that have lain untouched for `age_s`; those without a row are left over from a crash.

        Parts of uploads that broke off so long ago are removed on the way.
        """
        for entry in sorted(self._folder.iterdir()):
            try:
                old = now - entry.lstat().st_mtime >= age_s
            except FileNotFoundError:  # deleted meanwhile
                continue
            if not old:
                continue
            if entry.name.startswith(".") and entry.name.endswith(_PART):
                entry.unlink(missing_ok=True)
            elif is_file_id(entry.name):
                yield entry.name

    def _receive(self, source: BinaryIO, part: Path) -> tuple[int, str]:
        digest = hashlib.sha256()
        size_bytes = 0
        checked_at: int | None = None
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
            while chunk := source.read(_CHUNK_BYTES):
                size_bytes += len(chunk)
                if size_bytes > self._max_bytes:
                    raise PayloadTooLarge(
                        f"the file has more than {self._max_bytes:,} bytes, the most this server takes; "
                        "split it, or raise POSTTRAIN_MAX_UPLOAD_BYTES",
                        code="file_too_large",
                        param="file",
                    )
                if checked_at is None or size_bytes - checked_at >= _CHECK_EVERY_BYTES:
                    self._check_space(len(chunk))
                    checked_at = size_bytes
                digest.update(chunk)
                _write_all(file.fileno(), chunk)
            os.fsync(file.fileno())
        return size_bytes, digest.hexdigest()

    def _check_space(self, need_bytes: int) -> None:
        if shutil.disk_usage(self._folder).free - need_bytes < self._reserve_bytes:
            raise self._full()

    def _full(self) -> DiskFull:
        free = shutil.disk_usage(self._folder).free
        return DiskFull(
            f"the storage directory has {free:,} bytes free, and {self._reserve_bytes:,} must stay free; delete old "
            "jobs or files, or lower POSTTRAIN_DISK_RESERVE_BYTES"
        )


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
