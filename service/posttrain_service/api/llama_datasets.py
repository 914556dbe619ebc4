"""llama-stack's data sets: register, list, get, unregister, and their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import Use, json_body, only
from posttrain_service.api.llama_jobs import LlamaRoute
from posttrain_service.wire import llama_shapes as shapes
from posttrain_service.wire.llama_request import RegisterDataset
from posttrain_service.wire.llama_views import dataset_json, rows_json

PREFIXES = {"": "/v1", "_beta": "/v1beta"}
"""Endings of the operations' names, and prefixes of their paths."""
_DATASET: dict[int | str, dict[str, Any]] = {200: {"model": shapes.Dataset}}
_NULL: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "null"}}}}}

router = APIRouter(tags=["llama_stack_datasets"], route_class=LlamaRoute)


def register_dataset(body: Annotated[RegisterDataset, Body()], services: Use) -> Response:
    """Keep rows under a name. The same request again is harmless."""
    source = body.source.model_dump(mode="json", include=set(type(body.source).model_fields))
    made = services.registry.register(
        purpose=body.purpose, source=source, metadata=body.metadata or {}, dataset_id=body.dataset_id
    )
    return Answer(dataset_json(made))


def list_datasets(services: Use) -> Response:
    """Every data set."""
    return Answer({"data": [dataset_json(registered) for registered in services.registry.all()]})


def get_dataset(dataset_id: str, services: Use) -> Response:
    """One data set."""
    return Answer(dataset_json(services.registry.get(dataset_id)))


def unregister_dataset(dataset_id: str, services: Use) -> Response:
    """Forget a data set. Its rows go when no unended job reads them."""
    services.registry.unregister(dataset_id)
    return Answer(None)


def iterrows(
    dataset_id: str,
    services: Use,
    start_index: Annotated[int, Query(ge=0, le=2**53, description="Number of the first row, from 0.")] = 0,
    limit: Annotated[int, Query(ge=-1, le=2**53, description="Most rows; -1 = as many as one answer holds.")] = -1,
) -> Response:
    """Rows of a data set."""
    rows = services.registry.rows(dataset_id, start=start_index, limit=None if limit == -1 else limit)
    return Answer(rows_json(rows.data, has_more=rows.has_more))


def _add(path: str, method: str, endpoint: Callable[..., Response], responses: dict[int | str, dict[str, Any]], *query: str) -> None:
    needs = [only(*query), *([Depends(json_body)] if method == "POST" else [])]
    for ending, prefix in PREFIXES.items():
        router.add_api_route(
            f"{prefix}{path}", endpoint, methods=[method], name=f"llama_{endpoint.__name__}{ending}", responses=responses, dependencies=needs
        )


_add("/datasets", "POST", register_dataset, _DATASET)
_add("/datasets", "GET", list_datasets, {200: {"model": shapes.DatasetList}})
_add("/datasets/{dataset_id:path}", "GET", get_dataset, _DATASET)
_add("/datasets/{dataset_id:path}", "DELETE", unregister_dataset, _NULL)
_add("/datasetio/iterrows/{dataset_id:path}", "GET", iterrows, {200: {"model": shapes.IterrowsPage}}, "start_index", "limit")
