"""An external API for llama-stack 0.6: the `job/status`, `job/artifacts` and `job/cancel` routes that its clients still call.

That server moved them to `jobs/{job_uuid}/...`, and its clients of the same version did not follow. Each route here passes on to
the stack's post-training provider, whichever that is.
"""

# No `from __future__ import annotations`: llama-stack makes the routes of these annotations as they stand.
from collections.abc import Mapping
from typing import Any, Protocol

from llama_stack_api import (
    Api,
    CancelTrainingJobRequest,
    GetTrainingJobArtifactsRequest,
    GetTrainingJobStatusRequest,
    InlineProviderSpec,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobStatusResponse,
    webmethod,
)
from pydantic import BaseModel

NAME = "post_training_job_routes"
_MODULE = "posttrain_service.adapters.llama_stack.bridge"


class JobRoutes(Protocol):
    """The routes."""

    @webmethod(route="/post-training/job/status", method="GET", level="v1alpha")  # type: ignore[untyped-decorator]  # llama-stack is not installed where types are checked
    async def get_training_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """How a job is."""
        ...

    @webmethod(route="/post-training/job/artifacts", method="GET", level="v1alpha")  # type: ignore[untyped-decorator]  # llama-stack is not installed where types are checked
    async def get_training_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        """What a job has made."""
        ...

    @webmethod(route="/post-training/job/cancel", method="POST", level="v1alpha")  # type: ignore[untyped-decorator]  # llama-stack is not installed where types are checked
    async def cancel_training_job(self, job_uuid: str) -> None:
        """Stop a job for good."""
        ...


class BridgeConfig(BaseModel):
    """There is nothing to set."""


class Bridge:
    """Passes on to `post_training`, the stack's provider of that name."""

    def __init__(self, post_training: Any) -> None:
        self._post_training = post_training

    async def get_training_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """How a job is."""
        return await self._post_training.get_training_job_status(GetTrainingJobStatusRequest(job_uuid=job_uuid))

    async def get_training_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        """What a job has made."""
        return await self._post_training.get_training_job_artifacts(GetTrainingJobArtifactsRequest(job_uuid=job_uuid))

    async def cancel_training_job(self, job_uuid: str) -> None:
        """Stop a job for good."""
        await self._post_training.cancel_training_job(CancelTrainingJobRequest(job_uuid=job_uuid))


def available_providers() -> list[Any]:
    """The one provider of this API."""
    return [
        InlineProviderSpec(
            api=Api(NAME), provider_type=f"inline::{NAME}", module=_MODULE, config_class=f"{_MODULE}.BridgeConfig",
            api_dependencies=[Api.post_training], pip_packages=["posttrain"],
        )
    ]  # fmt: skip


async def get_provider_impl(config: BridgeConfig, deps: Mapping[Any, Any]) -> Bridge:
    """The provider.

    Args:
        config: Nothing.
        deps: Holds the stack's post-training provider.
    """
    return Bridge(deps[Api.post_training])
