"""Routes of /v1/files in OpenAI's shape: upload, list, read, content, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, BinaryIO, Literal, cast

import anyio.from_thread
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import IdempotencyKey, Use, only
from posttrain_service.api.download import file_response
from posttrain_service.api.multipart import Upload
from posttrain_service.domain.files import UPLOAD_PURPOSES, UploadedFile, check_filename
from posttrain_service.errors import InvalidRequest, PayloadTooLarge, ServiceError
from posttrain_service.wire import file_shapes as shapes
from posttrain_service.wire import files as wire
from posttrain_service.work.services import Services

router = APIRouter(prefix="/v1/files", tags=["files"])

_FORM_OVERHEAD_BYTES = 65536
_DRAIN_BYTES = 16 * 1024 * 1024
_FILE: dict[int | str, dict[str, Any]] = {200: {"model": shapes.File}}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.post("", responses=_FILE, dependencies=[only()], openapi_extra={"requestBody": shapes.UPLOAD_BODY})
async def create_file(request: Request, services: Use, key: IdempotencyKey) -> Response:
    """Upload a file; its bytes go to disk as they arrive."""
    refuse_by_length(request, services.settings.max_upload_bytes)
    body = request.stream()
    upload = Upload(request.headers.get("content-type", ""), fetcher(body))
    try:
        stored = await run_in_threadpool(_store, services, upload, key)
    except ServiceError:
        await drain(body)
        raise
    return Answer(wire.file_json(stored))


@router.get("", responses={200: {"model": shapes.FileList}}, dependencies=[only("after", "limit", "order", "purpose")])
def list_files(
    services: Use,
    after: Annotated[str | None, Query(description="Files that follow the one with this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most files in the answer.")] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="By age; desc = newest first.")] = "desc",
    purpose: Annotated[str | None, Query(description="Only files for this purpose.")] = None,
) -> Response:
    """Uploaded files."""
    page = services.files.page(after=after, limit=limit, purpose=purpose, newest_first=order == "desc")
    return Answer(wire.file_page_json(page))


@router.get("/{file_id}", responses=_FILE, dependencies=[only()])
def get_file(file_id: str, services: Use) -> Response:
    """One file's record."""
    return Answer(wire.file_json(services.files.get(file_id)))


@router.head("/{file_id}/content", include_in_schema=False, dependencies=[only()])
@router.get("/{file_id}/content", response_class=Response, responses={200: {"content": _BYTES}}, dependencies=[only()])
def get_file_content(request: Request, file_id: str, services: Use) -> Response:
    """The file's bytes; Range is supported."""
    path, record = services.files.content(file_id)
    return file_response(request, path, filename=record.filename)


@router.delete("/{file_id}", responses={200: {"model": shapes.FileDeleted}}, dependencies=[only()])
def delete_file(file_id: str, services: Use) -> Response:
    """Remove a file that no unfinished job needs."""
    services.files.delete(file_id)
    return Answer(wire.deleted_json(file_id))


class _Source:
    """The bytes of an upload's file for whoever stores them; what the form says after the file is checked at its end.

    Most clients send the purpose first. Some send the file first: then the one purpose that uploads may have is
    assumed, and a form that goes on to say something else fails before anything is kept.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        early = dict(upload.fields)
        self.expires_after_s = wire.expires_after_s(early)
        self.purpose = wire.purpose(early) if "purpose" in early else UPLOAD_PURPOSES[0]

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; b"" at the end."""
        data = self._upload.read(size)
        if not data and size != 0:
            self._check_form()
        return data

    def _check_form(self) -> None:
        fields = self._upload.fields
        if wire.purpose(fields) != self.purpose:
            raise InvalidRequest(
                f"purpose {fields['purpose'][:80]!r} is not supported: use {self.purpose!r}",
                code="invalid_purpose",
                param="purpose",
            )
        if wire.expires_after_s(fields) != self.expires_after_s:
            raise InvalidRequest("send expires_after before the file", param="expires_after")


def _store(services: Services, upload: Upload, key: str | None) -> UploadedFile:
    upload.find_file()
    source = _Source(upload)
    return services.files.create(
        cast(BinaryIO, source),
        filename=check_filename(upload.filename or "upload"),
        purpose=source.purpose,
        expires_after_s=source.expires_after_s,
        idempotency_key=key,
    )


def fetcher(body: AsyncIterator[bytes]) -> Callable[[], bytes]:
    """Fetch the next piece of the body from a worker thread."""

    async def following() -> bytes:
        try:
            async for piece in body:
                if piece:
                    return piece
        except ClientDisconnect as error:
            raise InvalidRequest("the client went away during the upload", code="upload_incomplete") from error
        return b""

    return lambda: anyio.from_thread.run(following)


def refuse_by_length(request: Request, most: int) -> None:
    """Refuse an upload that says itself that it is too large.

    Raises:
        PayloadTooLarge: Beyond `most` bytes.
    """
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > most + _FORM_OVERHEAD_BYTES:
        raise PayloadTooLarge(
            f"the upload has {length[:20]} bytes; the server takes at most {most} (POSTTRAIN_MAX_UPLOAD_BYTES)"
        )


async def drain(body: AsyncIterator[bytes]) -> None:
    """Read a little on, so that a client that is still sending sees the answer instead of a closed connection."""
    left = _DRAIN_BYTES
    try:
        while left > 0 and (piece := await anext(body, None)) is not None:
            left -= len(piece)
    except ClientDisconnect:
        return
