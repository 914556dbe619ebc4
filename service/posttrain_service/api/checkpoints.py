"""Routes of a job's checkpoints: list, one, its files, all of them as a tar, removal."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import Use, only
from posttrain_service.api.download import file_response, tar_response
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire import shapes
from posttrain_service.wire.views import checkpoint_json

router = APIRouter(prefix="/post_training/jobs/{job_uuid}/checkpoints", tags=["checkpoints"])

_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TAR = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}


@router.get("", responses={200: {"model": shapes.CheckpointList}}, dependencies=[only("after", "limit")])
def list_checkpoints(
    job_uuid: str,
    services: Use,
    after: Annotated[str | None, Query(description="Checkpoints after the one with this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most checkpoints in the answer.")] = 100,
) -> Response:
    """Complete checkpoints by step."""
    found = services.jobs.checkpoints(job_uuid)
    if after is not None:
        step = _step(after)
        found = [checkpoint for checkpoint in found if checkpoint["step"] > step]
    shown = [checkpoint_json(checkpoint) for checkpoint in found[:limit]]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return Answer({"data": shown, "has_more": len(found) > limit, "first_id": first, "last_id": last})


@router.get("/{checkpoint_id}", responses={200: {"model": shapes.Checkpoint}}, dependencies=[only()])
def get_checkpoint(job_uuid: str, checkpoint_id: str, services: Use) -> Response:
    """One checkpoint."""
    return Answer(checkpoint_json(services.jobs.checkpoint(job_uuid, checkpoint_id)))


@router.head("/{checkpoint_id}/files/{path:path}", include_in_schema=False, dependencies=[only()])
@router.get(
    "/{checkpoint_id}/files/{path:path}",
    response_class=Response,
    responses={200: {"content": _BYTES}, 206: {"content": _BYTES, "description": "The range that was asked for."}},
    dependencies=[only()],
)
def get_checkpoint_file(request: Request, job_uuid: str, checkpoint_id: str, path: str, services: Use) -> Response:
    """One file of a checkpoint; Range is supported."""
    found, _ = services.jobs.checkpoint_file(job_uuid, checkpoint_id, path)
    return file_response(request, found, filename=path.rsplit("/", 1)[-1])


@router.get(
    "/{checkpoint_id}/archive", response_class=Response, responses={200: {"content": _TAR}}, dependencies=[only()]
)
def get_checkpoint_archive(job_uuid: str, checkpoint_id: str, services: Use) -> Response:
    """Every file of a checkpoint as an uncompressed tar."""
    checkpoint = services.jobs.checkpoint(job_uuid, checkpoint_id)
    members = services.jobs.checkpoint_files(job_uuid, checkpoint_id)
    folder = f"{job_uuid}-{checkpoint_id}"
    named = [(f"{folder}/{name}", path, size) for name, path, size in members]
    return tar_response(named, filename=f"{folder}.tar", mtime=checkpoint["created_at"])


@router.delete("/{checkpoint_id}", status_code=204, response_class=Response, dependencies=[only()])
def delete_checkpoint(job_uuid: str, checkpoint_id: str, services: Use) -> Response:
    """Remove one checkpoint of a job that has ended; 409 for any other, which goes on from its checkpoints."""
    services.jobs.delete_checkpoint(job_uuid, checkpoint_id)
    return Response(status_code=204)


def _step(checkpoint_id: str) -> int:
    """The step in a checkpoint's id, whether or not that checkpoint still exists: it may have been pruned between pages."""
    name, _, digits = checkpoint_id.partition("-")
    if name != "step" or not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise InvalidRequest(
            f"{checkpoint_id[:100]!r} is not a checkpoint id; they look like step-000100", param="after"
        )
    return int(digits)
