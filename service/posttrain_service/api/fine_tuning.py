"""Routes of /v1/fine_tuning/jobs in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import METADATA, IdempotencyKey, Use, json_body, metadata_filter, only
from posttrain_service.api.strict_json import StrictRoute
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire import openai_shapes as shapes
from posttrain_service.wire.openai_request import CreateFineTuningJob, translate
from posttrain_service.wire.openai_views import checkpoint_json, fine_tuning_job_json, list_json, page_of, timeline
from posttrain_service.wire.shapes import METADATA_PARAMETER
from posttrain_service.work.services import EventView, JobView, Services

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine_tuning"], route_class=StrictRoute)

_JOB: dict[int | str, dict[str, Any]] = {200: {"model": shapes.FineTuningJob}}
_EVENTS_AT_ONCE = 1000

After = Annotated[str | None, Query(description="What follows the item with this id.")]


@router.post("", responses=_JOB, dependencies=[Depends(json_body), only()])
def create_fine_tuning_job(
    body: Annotated[CreateFineTuningJob, Body()], services: Use, key: IdempotencyKey
) -> Response:
    """Accept a job; its files are checked next, and bad rows end it as failed."""
    view, _ = services.jobs.accept(translate(body), idempotency_key=key)
    return Answer(fine_tuning_job_json(view))


@router.get(
    "",
    responses={200: {"model": shapes.FineTuningJobList}},
    dependencies=[only("after", "limit", "metadata", METADATA)],
    openapi_extra={"parameters": [METADATA_PARAMETER]},
)
def list_fine_tuning_jobs(
    request: Request,
    services: Use,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Most jobs in the answer.")] = 20,
) -> Response:
    """Jobs, newest first, by whichever API they were made; metadata=null: those without metadata."""
    page = services.jobs.page(after=after, limit=limit, metadata=_metadata(request))
    files = services.jobs.result_files([view.job for view in page.data])
    data = [fine_tuning_job_json(view, files[view.job.run_id]) for view in page.data]
    return Answer(list_json(data, has_more=page.has_more))


@router.get("/{job_id}", responses=_JOB, dependencies=[only()])
def get_fine_tuning_job(job_id: str, services: Use) -> Response:
    """One job."""
    return _answer(services, services.jobs.get(job_id))


@router.post("/{job_id}/cancel", responses=_JOB, dependencies=[only()])
def cancel_fine_tuning_job(job_id: str, services: Use, key: IdempotencyKey) -> Response:
    """Stop the job for good. Repeating is harmless."""
    return _answer(services, services.jobs.cancel(job_id))


@router.post("/{job_id}/pause", responses=_JOB, dependencies=[only()])
def pause_fine_tuning_job(job_id: str, services: Use, key: IdempotencyKey) -> Response:
    """Save a checkpoint and stop, so that the job can go on later."""
    return _answer(services, services.jobs.pause(job_id))


@router.post("/{job_id}/resume", responses=_JOB, dependencies=[only()])
def resume_fine_tuning_job(job_id: str, services: Use, key: IdempotencyKey) -> Response:
    """Queue a paused job again."""
    return _answer(services, services.jobs.resume(job_id))


@router.get(
    "/{job_id}/events", responses={200: {"model": shapes.FineTuningEventList}}, dependencies=[only("after", "limit")]
)
def list_fine_tuning_events(
    job_id: str,
    services: Use,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most events in the answer.")] = 20,
) -> Response:
    """Events and metrics of the job, newest first."""
    view = services.jobs.get(job_id)
    total = (view.progress or {}).get("total_steps")
    events = timeline(_all_events(services, job_id), services.jobs.metrics(job_id), total)
    return Answer(page_of(events, after, limit))


@router.get(
    "/{job_id}/checkpoints",
    responses={200: {"model": shapes.FineTuningCheckpointList}},
    dependencies=[only("after", "limit")],
)
def list_fine_tuning_checkpoints(
    job_id: str,
    services: Use,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most checkpoints in the answer.")] = 10,
) -> Response:
    """Complete checkpoints of the job, highest step first."""
    view = services.jobs.get(job_id)
    found = sorted(view.checkpoints, key=lambda checkpoint: int(checkpoint["step"]), reverse=True)
    return Answer(page_of([checkpoint_json(view.job, checkpoint) for checkpoint in found], after, limit))


def _answer(services: Services, view: JobView) -> Answer:
    return Answer(fine_tuning_job_json(view, services.jobs.result_files([view.job])[view.job.run_id]))


def _all_events(services: Services, job_id: str) -> list[EventView]:
    found: list[EventView] = []
    after = None
    while True:
        page = services.jobs.events(job_id, after=after, limit=_EVENTS_AT_ONCE, newest_first=True)
        found += page.data
        if not page.has_more:
            return found
        after = page.last_id


def _metadata(request: Request) -> dict[str, str] | None:
    """The pairs to look for; empty = jobs without any; None = all jobs."""
    pairs = metadata_filter(request)
    whole = request.query_params.get("metadata")
    if whole is None:
        return pairs or None
    if whole != "null" or pairs:
        raise InvalidRequest("metadata is either null or given as metadata[key]=value", param="metadata")
    return {}
