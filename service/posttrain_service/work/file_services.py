"""What the faces may do with files; see `services`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from posttrain_service.domain.files import UploadedFile
    from posttrain_service.domain.uploads import PartedUpload
    from posttrain_service.work.services import Page


class FileService(Protocol):
    """Uploaded files. An unknown or expired id is NotFound, and so is another owner's. `owner`: None = the caller."""

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
        """Store the bytes of `source`, hashed and size-capped; TooLarge beyond max_upload_bytes."""
        ...

    def get(self, file_id: str) -> UploadedFile:
        """The file's record."""
        ...

    def page(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        purpose: str | None = None,
        owner: str | None = None,
        newest_first: bool = True,
    ) -> Page[UploadedFile]:
        """Files by age."""
        ...

    def content(self, file_id: str) -> tuple[Path, UploadedFile]:
        """Where its bytes are."""
        ...

    def delete(self, file_id: str) -> None:
        """Remove it; Conflict while a job that hasn't ended needs it."""
        ...


class PartService(Protocol):
    """Files handed in by parts. An unknown id or another owner's is NotFound; an upload that isn't pending any more is a Conflict."""

    def create(
        self,
        *,
        size_bytes: int,
        filename: str,
        purpose: str,
        mime_type: str,
        owner: str | None = None,
        expires_after_s: int | None = None,
    ) -> PartedUpload:
        """Begin an upload of a file of that size."""
        ...

    def add(self, upload_id: str, source: BinaryIO) -> tuple[str, float]:
        """Store a part; its id, and when that was (epoch seconds)."""
        ...

    def complete(self, upload_id: str, part_ids: Sequence[str], md5: str | None = None) -> tuple[PartedUpload, UploadedFile]:
        """Put the parts together, in the order given, and register the file; repeating is harmless.

        Raises:
            InvalidRequest: A part that isn't there, or the whole has another size or md5.
        """
        ...

    def cancel(self, upload_id: str) -> PartedUpload:
        """Drop it with its parts; repeating is harmless."""
        ...

    def status(self, upload: PartedUpload) -> str:
        """pending, completed, cancelled or expired."""
        ...
