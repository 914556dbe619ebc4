"""Routes of /v1/uploads in OpenAI's shape: a large file handed in by parts."""

from __future__ import annotations

from typing import Annotated, Any, BinaryIO, cast

from fastapi import APIRouter, Body, Depends, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import Use, json_body, only
from posttrain_service.api.files import drain, fetcher, refuse_by_length
from posttrain_service.api.multipart import Upload
from posttrain_service.api.strict_json import StrictRoute
from posttrain_service.domain.uploads import MAX_PART_BYTES
from posttrain_service.errors import ServiceError
from posttrain_service.wire import openai_shapes as shapes
from posttrain_service.wire.openai_views import part_json, upload_json
from posttrain_service.work.services import Services

router = APIRouter(prefix="/v1/uploads", tags=["uploads"], route_class=StrictRoute)

_UPLOAD: dict[int | str, dict[str, Any]] = {200: {"model": shapes.UploadObject}}


@router.post("", responses=_UPLOAD, dependencies=[Depends(json_body), only()])
def create_upload(body: Annotated[shapes.CreateUpload, Body()], services: Use) -> Response:
    """Begin a file of a known size."""
    upload = services.parts.create(
        size_bytes=body.bytes,
        filename=body.filename,
        purpose=body.purpose,
        mime_type=body.mime_type,
        expires_after_s=None if body.expires_after is None else body.expires_after.seconds,
    )
    return Answer(upload_json(upload, services.parts.status(upload), None))


@router.post(
    "/{upload_id}/parts",
    responses={200: {"model": shapes.UploadPart}},
    dependencies=[only()],
    openapi_extra={"requestBody": shapes.PART_BODY},
)
async def add_upload_part(request: Request, upload_id: str, services: Use) -> Response:
    """Hand in one part, of up to 64 MiB; its bytes go to disk as they arrive."""
    refuse_by_length(request, min(MAX_PART_BYTES, services.settings.max_upload_bytes))
    body = request.stream()
    try:
        form = Upload(request.headers.get("content-type", ""), fetcher(body), part="data")
        part = await run_in_threadpool(_add, services, upload_id, form)
    except ServiceError:
        await drain(body)
        raise
    return Answer(part)


@router.post("/{upload_id}/complete", responses=_UPLOAD, dependencies=[Depends(json_body), only()])
def complete_upload(upload_id: str, body: Annotated[shapes.CompleteUpload, Body()], services: Use) -> Response:
    """Put the parts together to a file. Repeating is harmless."""
    upload, file = services.parts.complete(upload_id, body.part_ids, body.md5)
    return Answer(upload_json(upload, services.parts.status(upload), file))


@router.post("/{upload_id}/cancel", responses=_UPLOAD, dependencies=[only()])
def cancel_upload(upload_id: str, services: Use) -> Response:
    """Drop an upload with its parts. Repeating is harmless."""
    upload = services.parts.cancel(upload_id)
    return Answer(upload_json(upload, services.parts.status(upload), None))


def _add(services: Services, upload_id: str, form: Upload) -> dict[str, Any]:
    form.find_file()
    part_id, created_at = services.parts.add(upload_id, cast(BinaryIO, form))
    return part_json(part_id, upload_id, created_at)
