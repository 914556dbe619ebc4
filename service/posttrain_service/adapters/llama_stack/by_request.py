"""The provider for llama-stack 0.5 and 0.6, which hand over request objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import HTTPException
from llama_stack_api import (
    ConflictError,
    IterRowsRequest,
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobStatusResponse,
    ResourceNotFoundError,
)

from posttrain_service.adapters.llama_stack.embedded import Embedded, Rows, dataset_ids
from posttrain_service.errors import (
    Conflict,
    DiskFull,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    ServiceError,
    UnsupportedMethod,
)

T = TypeVar("T")
_STATUS = {InvalidRequest: 400, UnsupportedMethod: 400, QuotaExceeded: 429, DiskFull: 507}


class Provider:
    """See llama-stack's PostTraining protocol.

    Args:
        embedded: The service.
        datasetio: llama-stack's API that reads rows.
    """

    def __init__(self, embedded: Embedded, datasetio: Any) -> None:
        self._embedded = embedded
        self._datasetio = datasetio

    async def shutdown(self) -> None:
        """Stop the loops; jobs run on."""
        await asyncio.to_thread(self._embedded.end)

    async def health(self) -> dict[str, Any]:
        """Whether the service can do its work."""
        return await asyncio.to_thread(self._embedded.health)

    async def supervised_fine_tune(self, request: Any) -> PostTrainingJob:
        """Queue a supervised fine-tuning."""
        return PostTrainingJob(**await self._created(self._embedded.supervised_fine_tune, request))

    async def preference_optimize(self, request: Any) -> PostTrainingJob:
        """Queue a preference training."""
        return PostTrainingJob(**await self._created(self._embedded.preference_optimize, request))

    async def get_training_jobs(self) -> ListPostTrainingJobsResponse:
        """Every job."""
        return ListPostTrainingJobsResponse(data=[PostTrainingJob(**job) for job in await _ask(self._embedded.jobs)])

    async def get_training_job_status(self, request: Any) -> PostTrainingJobStatusResponse:
        """How a job is."""
        return PostTrainingJobStatusResponse(**await _ask(self._embedded.status, request.job_uuid))

    async def cancel_training_job(self, request: Any) -> None:
        """Stop a job for good."""
        await _ask(self._embedded.cancel, request.job_uuid)

    async def get_training_job_artifacts(self, request: Any) -> PostTrainingJobArtifactsResponse:
        """What a job has made."""
        return PostTrainingJobArtifactsResponse(**await _ask(self._embedded.artifacts, request.job_uuid))

    async def _created(self, create: Callable[..., dict[str, Any]], request: Any) -> dict[str, Any]:
        body = request.model_dump(mode="json", exclude_unset=True)
        rows: Rows = {name: (await self._datasetio.iterrows(IterRowsRequest(dataset_id=name, limit=-1))).data for name in dataset_ids(body)}
        return await _ask(create, body, rows)


async def _ask(do: Callable[..., T], *arguments: Any) -> T:
    """What the service answers; its errors as ones that llama-stack keeps the connection open for."""
    try:
        return await asyncio.to_thread(do, *arguments)
    except NotFound as error:
        raise ResourceNotFoundError(str(arguments[0]), "Training job", "alpha.post_training.job.list") from error
    except Conflict as error:
        raise ConflictError(error.message) from error
    except ServiceError as error:
        raise HTTPException(_STATUS.get(type(error), 503), error.message) from error
