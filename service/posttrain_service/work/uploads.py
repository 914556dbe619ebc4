"""Uploaded files: received, listed, read back, deleted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from posttrain_service.clock import Clock
from posttrain_service.domain.files import UploadedFile, check_filename, check_purpose, expiry
from posttrain_service.domain.keys import DEFAULT_OWNER
from posttrain_service.errors import InvalidRequest, NotFound, QuotaExceeded
from posttrain_service.ids import is_file_id, new_file_id
from posttrain_service.runs.blobs import Blobs
from posttrain_service.settings import Settings
from posttrain_service.store.idempotency import IdempotencyKey
from posttrain_service.store.store import Store
from posttrain_service.work.quota import Quota
from posttrain_service.work.services import Page

CREATE = "files.create"
MAX_LIMIT = 10_000


@dataclass(frozen=True)
class Uploads:
    """See `FileService`."""

    settings: Settings
    store: Store
    clock: Clock
    blobs: Blobs
    quota: Quota
    """What uploads and runs may take up."""
    owner: str = DEFAULT_OWNER
    """Whose files are made here."""

    def create(
        self,
        source: BinaryIO,
        *,
        filename: str,
        purpose: str,
        owner: str | None = None,
        expires_after_s: int | None = None,
        idempotency_key: str | None = None,
    ) -> UploadedFile:
        """See `FileService.create`."""
        owner = owner or self.owner
        name = check_filename(filename)
        check_purpose(purpose)
        now = self.clock.now()
        expires_at = expiry(now, expires_after_s)
        self.quota.check(owner)
        blob = self.blobs.save(source, new_file_id())
        try:
            self.quota.check(owner, blob.size_bytes)
        except QuotaExceeded:
            self.blobs.delete(blob.file_id)
            raise
        file = UploadedFile(
            id=blob.file_id,
            owner=owner,
            filename=name,
            purpose=purpose,
            size_bytes=blob.size_bytes,
            sha256=blob.sha256,
            created_at=now,
            expires_at=expires_at,
        )
        try:
            stored, new = self.store.files.insert(file, idempotency=self._key(file, expires_after_s, idempotency_key))
        except BaseException:
            if not self.store.files.known([blob.file_id]):
                self.blobs.delete(blob.file_id)
            raise
        if not new:
            self.blobs.delete(blob.file_id)
        return stored

    def get(self, file_id: str) -> UploadedFile:
        """See `FileService.get`."""
        file = self.store.files.get(file_id) if is_file_id(file_id) else None
        if file is None:
            raise NotFound(f"there is no file {file_id[:140]!r}", code="file_not_found", param="file_id")
        return file

    def page(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        purpose: str | None = None,
        owner: str | None = None,
        newest_first: bool = True,
    ) -> Page[UploadedFile]:
        """See `FileService.page`."""
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit is {limit}; give 1 to {MAX_LIMIT}", param="limit")
        found = self.store.files.page(after=after, limit=limit, purpose=purpose, owner=owner, newest_first=newest_first)
        ids = [file.id for file in found.data]
        return Page(found.data, found.has_more, ids[0] if ids else None, ids[-1] if ids else None)

    def content(self, file_id: str) -> tuple[Path, UploadedFile]:
        """See `FileService.content`."""
        file = self.get(file_id)
        path = self.blobs.path(file.id)
        if not path.is_file():
            raise NotFound(f"the bytes of file {file_id} are gone", code="file_not_found", param="file_id")
        return path, file

    def delete(self, file_id: str) -> None:
        """See `FileService.delete`."""
        self.get(file_id)
        self.store.files.delete(file_id)
        self.blobs.delete(file_id)

    def _key(self, file: UploadedFile, expires_after_s: int | None, key: str | None) -> IdempotencyKey | None:
        if key is None:
            return None
        check_key(key)
        body = json.dumps([file.sha256, file.filename, file.purpose, expires_after_s])
        digest = hashlib.sha256(body.encode()).hexdigest()
        return IdempotencyKey(file.owner, CREATE, key, digest, self.settings.idempotency_ttl_s)


def check_key(key: str) -> str:
    """An Idempotency-Key, unchanged.

    Raises:
        InvalidRequest: It is empty, too long or holds control characters.
    """
    if not 0 < len(key) <= 255 or not key.isprintable():
        raise InvalidRequest("Idempotency-Key must have 1 to 255 printable characters", param="Idempotency-Key")
    return key
