"""Routes of /v1/models, in OpenAI's shape: base models, and what jobs have made."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import Use, only
from posttrain_service.domain.results import parse_result
from posttrain_service.errors import Forbidden
from posttrain_service.wire import model_shapes
from posttrain_service.wire.views import model_json, page_json

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", responses={200: {"model": model_shapes.ModelList}}, dependencies=[only("after", "limit")])
def list_models(
    services: Use,
    after: Annotated[str | None, Query(description="Models after the one with this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most models in the answer.")] = 1000,
) -> Response:
    """Base models by name, then the results of jobs, newest first. Each id may be a further job's `model`."""
    return Answer({"object": "list", **page_json(services.models.page(after=after, limit=limit), model_json)})


@router.get("/{model:path}", responses={200: {"model": model_shapes.Model}}, dependencies=[only()])
def get_model(model: str, services: Use) -> Response:
    """One model, or one checkpoint of a job by `ft:...:ckpt-step-N`."""
    return Answer(model_json(services.models.get(model)))


@router.delete("/{model:path}", responses={200: {"model": model_shapes.ModelDeleted}}, dependencies=[only()])
def delete_model(model: str, services: Use) -> Response:
    """Remove what a job has made: all its checkpoints, or the one that is named. The job's record stays."""
    found = services.models.get(model)
    if found.job_uuid is None or found.checkpoint is None:
        raise Forbidden(f"model {model!r} is a base model of the server; only results of jobs can be deleted", param="model")
    name = parse_result(model)
    whole = name is None or name.step is None
    ids = [str(made["id"]) for made in services.jobs.checkpoints(found.job_uuid)] if whole else [found.checkpoint]
    for checkpoint_id in ids:
        services.jobs.delete_checkpoint(found.job_uuid, checkpoint_id)
    return Answer({"id": model, "object": "model", "deleted": True})
