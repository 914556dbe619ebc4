"""What the faces may do with files; see `services`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from posttrain_service.domain.files import UploadedFile
    from posttrain_service.domain.registered import RegisteredSet
    from posttrain_service.domain.uploads import PartedUpload
    from posttrain_service.work.registry import Rows
    from posttrain_service.work.services import Page
    from posttrain_trainer.contract.conversation import TrainOn


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


class RegistryService(Protocol):
    """Data sets under names of their own. An unknown name or another owner's is NotFound."""

    def register(
        self, *, purpose: str, source: Mapping[str, Any], metadata: Mapping[str, Any], dataset_id: str | None = None
    ) -> RegisteredSet:
        """Keep the rows of a source under a name; the same request again is harmless.

        Args:
            purpose: What its owner says it is for.
            source: `{"type": "rows", "rows": [...]}` or `{"type": "uri", "uri": ...}` (data:, or file: in the data sets' folder).
            metadata: Its owner's notes.
            dataset_id: Its name; None = the server makes one.

        Raises:
            InvalidRequest: A name, an address or rows that cannot be used.
            Conflict: The name is taken by another data set.
        """
        ...

    def get(self, dataset_id: str) -> RegisteredSet:
        """The data set of that name."""
        ...

    def all(self) -> list[RegisteredSet]:
        """Every data set, oldest first."""
        ...

    def unregister(self, dataset_id: str) -> None:
        """Forget the data set; its rows go when no unended job reads them."""
        ...

    def rows(self, dataset_id: str, *, start: int = 0, limit: int | None = None) -> Rows:
        """Rows from the one numbered `start` (from 0), at most `limit` (None: as many as one answer holds)."""
        ...


class DatasetService(Protocol):
    """Data sets before any job."""

    def validate(
        self,
        dataset: str | Mapping[str, Any],
        *,
        model: str | None = None,
        method: Mapping[str, Any] | None = None,
        train_on: TrainOn = "assistant",
    ) -> dict[str, Any]:
        """valid, rows, format, errors (line, message), num_errors, warnings, and tokens when a model is named.

        Args:
            dataset: A file id, or {"rows": [...]}.
            model: A model name or id: tokens are then counted by its tokenizer.
            method: The method the rows are for; None = sft.
            train_on: Which turns of conversations are learned; a row without any is bad.
        """
        ...
