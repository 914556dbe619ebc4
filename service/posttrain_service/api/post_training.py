"""Routes of /post_training/jobs: create, read, list, and the verbs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import METADATA, IdempotencyKey, Use, json_body, metadata_filter, only
from posttrain_service.api.strict_json import StrictRoute
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire import shapes
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.wire.views import job_json, page_json

router = APIRouter(prefix="/post_training/jobs", tags=["jobs"], route_class=StrictRoute)

_JOB: dict[int | str, dict[str, Any]] = {200: {"model": shapes.Job}}
_CREATED: dict[int | str, dict[str, Any]] = {
    201: {"model": shapes.Job, "description": "The job is queued."},
    200: {
        "model": shapes.Job | shapes.Plan,
        "description": "The same request had made this job already; or the dry run's plan.",
    },
}


@router.post("", status_code=201, responses=_CREATED, dependencies=[Depends(json_body), only("dry_run")])
def create_job(
    request: Request,
    body: Annotated[JobRequest, Body()],
    services: Use,
    key: IdempotencyKey,
    dry_run: Annotated[bool, Query(description="Store nothing, and answer with the plan.")] = False,
) -> Response:
    """Queue a job, or with dry_run say what would be started."""
    if dry_run:
        return Answer(services.jobs.plan(body))
    view, created = services.jobs.create(body, idempotency_key=key)
    headers = {"location": f"{request.scope.get('root_path', '')}/post_training/jobs/{view.job.job_uuid}"}
    if not created:
        headers["idempotent-replayed"] = "true"
    return Answer(job_json(view), 201 if created else 200, headers)


@router.get(
    "",
    responses={200: {"model": shapes.JobList}},
    dependencies=[only("after", "before", "limit", "status", "owner", METADATA)],
    openapi_extra={"parameters": [shapes.METADATA_PARAMETER]},
)
def list_jobs(
    request: Request,
    services: Use,
    after: Annotated[str | None, Query(description="Jobs older than the one with this id.")] = None,
    before: Annotated[str | None, Query(description="Jobs newer than the one with this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Most jobs in the answer.")] = 20,
    status: Annotated[list[JobState] | None, Query(description="Only jobs in these states.")] = None,
    owner: Annotated[str | None, Query(description="Only jobs of this owner.")] = None,
) -> Response:
    """Jobs, newest first."""
    if after is not None and before is not None:
        raise InvalidRequest("after and before exclude each other; give one", param="before")
    page = services.jobs.page(
        after=after,
        before=before,
        limit=limit,
        status=[str(state) for state in status or ()],
        owner=owner,
        metadata=metadata_filter(request) or None,
    )
    return Answer(page_json(page, job_json))


@router.get("/{job_uuid}", responses=_JOB, dependencies=[only()])
def get_job(job_uuid: str, services: Use) -> Response:
    """One job."""
    return Answer(job_json(services.jobs.get(job_uuid)))


@router.post("/{job_uuid}/cancel", responses=_JOB, dependencies=[only()])
def cancel_job(job_uuid: str, services: Use, key: IdempotencyKey) -> Response:
    """Stop the job for good. Repeating is harmless."""
    return Answer(job_json(services.jobs.cancel(job_uuid)))


@router.post("/{job_uuid}/pause", responses=_JOB, dependencies=[only()])
def pause_job(job_uuid: str, services: Use, key: IdempotencyKey) -> Response:
    """Save a checkpoint and stop, so that the job can go on later."""
    return Answer(job_json(services.jobs.pause(job_uuid)))


@router.post("/{job_uuid}/resume", responses=_JOB, dependencies=[only()])
def resume_job(job_uuid: str, services: Use, key: IdempotencyKey) -> Response:
    """Queue a paused job again."""
    return Answer(job_json(services.jobs.resume(job_uuid)))


@router.post("/{job_uuid}/retry", responses=_JOB, dependencies=[only()])
def retry_job(job_uuid: str, services: Use, key: IdempotencyKey) -> Response:
    """Start a new attempt of a job that failed or was cancelled."""
    return Answer(job_json(services.jobs.retry(job_uuid)))


@router.delete("/{job_uuid}", status_code=204, response_class=Response, dependencies=[only()])
def delete_job(job_uuid: str, services: Use) -> Response:
    """Remove an ended job: artifacts first, then the row."""
    services.jobs.delete(job_uuid)
    return Response(status_code=204)
