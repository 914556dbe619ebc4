"""The provider for llama-stack 0.2 to 0.4, which hand over keywords and build their routes from these annotations."""

# No `from __future__ import annotations`: those versions read the annotations as they stand.
import asyncio
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from posttrain_service.adapters.llama_stack.embedded import Embedded, Rows, dataset_ids
from posttrain_service.errors import InvalidRequest, ServiceError

T = TypeVar("T")


def _types() -> Any:
    try:
        return importlib.import_module("llama_stack.apis.post_training")
    except ImportError:  # 0.4
        return importlib.import_module("llama_stack_api")


_stack = _types()
AlgorithmConfig: Any = _stack.AlgorithmConfig
DPOAlignmentConfig: Any = _stack.DPOAlignmentConfig
ListPostTrainingJobsResponse: Any = _stack.ListPostTrainingJobsResponse
PostTrainingJob: Any = _stack.PostTrainingJob
PostTrainingJobArtifactsResponse: Any = _stack.PostTrainingJobArtifactsResponse
PostTrainingJobStatusResponse: Any = _stack.PostTrainingJobStatusResponse
TrainingConfig: Any = _stack.TrainingConfig


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

    async def supervised_fine_tune(
        self,
        job_uuid: str,
        training_config: TrainingConfig,
        hyperparam_search_config: dict[str, Any],
        logger_config: dict[str, Any],
        model: str | None = None,
        checkpoint_dir: str | None = None,
        algorithm_config: AlgorithmConfig | None = None,
    ) -> PostTrainingJob:
        """Queue a supervised fine-tuning."""
        body = _body(
            job_uuid=job_uuid, training_config=training_config, hyperparam_search_config=hyperparam_search_config,
            logger_config=logger_config, model=model, checkpoint_dir=checkpoint_dir, algorithm_config=algorithm_config,
        )  # fmt: skip
        return await self._created(self._embedded.supervised_fine_tune, body)

    async def preference_optimize(
        self,
        job_uuid: str,
        finetuned_model: str,
        algorithm_config: DPOAlignmentConfig,
        training_config: TrainingConfig,
        hyperparam_search_config: dict[str, Any],
        logger_config: dict[str, Any],
    ) -> PostTrainingJob:
        """Queue a preference training."""
        body = _body(
            job_uuid=job_uuid, finetuned_model=finetuned_model, algorithm_config=algorithm_config,
            training_config=training_config, hyperparam_search_config=hyperparam_search_config, logger_config=logger_config,
        )  # fmt: skip
        return await self._created(self._embedded.preference_optimize, body)

    async def get_training_jobs(self) -> ListPostTrainingJobsResponse:
        """Every job."""
        return ListPostTrainingJobsResponse(data=[PostTrainingJob(**job) for job in await _ask(self._embedded.jobs)])

    async def get_training_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """How a job is."""
        return PostTrainingJobStatusResponse(**await _ask(self._embedded.status, job_uuid))

    async def cancel_training_job(self, job_uuid: str) -> None:
        """Stop a job for good."""
        await _ask(self._embedded.cancel, job_uuid)

    async def get_training_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        """What a job has made."""
        return PostTrainingJobArtifactsResponse(**await _ask(self._embedded.artifacts, job_uuid))

    async def _created(self, create: Callable[..., dict[str, Any]], body: dict[str, Any]) -> Any:
        rows: Rows = {name: (await self._datasetio.iterrows(dataset_id=name, limit=-1)).data for name in dataset_ids(body)}
        return PostTrainingJob(**await _ask(create, body, rows))


def _body(**given: Any) -> dict[str, Any]:
    """The request as it stood in JSON; what was left out stays out."""
    shown = {name: value.model_dump(mode="json", exclude_unset=True) if hasattr(value, "model_dump") else value for name, value in given.items()}
    return {name: value for name, value in shown.items() if value is not None}


async def _ask(do: Callable[..., T], *arguments: Any) -> T:
    """What the service answers; its errors as these versions' own providers raise them, which they answer by 400."""
    try:
        return await asyncio.to_thread(do, *arguments)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    except ServiceError as error:
        raise (RuntimeError if error.should_retry else ValueError)(error.message) from error
