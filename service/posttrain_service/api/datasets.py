"""Routes of /post_training/datasets: a look at rows before any job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Depends
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import IdempotencyKey, Use, json_body, only
from posttrain_service.api.strict_json import StrictRoute
from posttrain_service.wire.datasets import DatasetReport, ValidateRequest

router = APIRouter(prefix="/post_training/datasets", tags=["datasets"], route_class=StrictRoute)


@router.post("/validate", responses={200: {"model": DatasetReport}}, dependencies=[Depends(json_body), only()])
def validate_dataset(body: Annotated[ValidateRequest, Body()], services: Use, key: IdempotencyKey) -> Response:
    """Say line by line what is wrong with a data set; 200 also when something is."""
    dataset = body.dataset if isinstance(body.dataset, str) else body.dataset.model_dump(mode="json")
    method = None if body.method is None else body.method.model_dump(mode="json")
    return Answer(services.datasets.validate(dataset, model=body.model, method=method, train_on=body.train_on))
