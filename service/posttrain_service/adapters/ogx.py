"""Post-training for OGX, llama-stack's successor, which has none: an external API whose routes are this service's own.

The stack serves llama-stack's post-training and data set routes, as `posttrain serve` does, from a service inside its
process. Jobs run in process trees of their own: they go on when the stack is killed and are found again by its next start.
Who may call is the stack's business; every caller sees every job.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException

from posttrain_service import compose
from posttrain_service.api import llama_datasets, llama_jobs
from posttrain_service.api.errors import status_of
from posttrain_service.errors import InvalidRequest, ServiceError
from posttrain_service.settings import Settings

NAME = "post_training"
_MODULE = "posttrain_service.adapters.ogx"


class PostTraining(Protocol):
    """What OGX asks of the provider: nothing beyond the routes that are made of it."""

    async def shutdown(self) -> None:
        """End with the stack."""
        ...


class PosttrainConfig(Settings):
    """Every setting of the service by its name in a stack's configuration; what isn't there comes from POSTTRAIN_*."""


class Provider:
    """A running service.

    Args:
        runtime: Its parts, the loops started.
    """

    def __init__(self, runtime: compose.Runtime) -> None:
        self.runtime = runtime

    async def shutdown(self) -> None:
        """Stop the loops; jobs run on."""
        await asyncio.to_thread(self.runtime.stop)


def available_providers() -> list[Any]:
    """The one provider of this API."""
    types = importlib.import_module("ogx_api")
    return [
        types.InlineProviderSpec(
            api=types.Api(NAME), provider_type="inline::huggingface-ilab", module=_MODULE,
            config_class=f"{_MODULE}.PosttrainConfig", pip_packages=["posttrain"],
        )
    ]  # fmt: skip


async def get_provider_impl(config: PosttrainConfig, deps: Mapping[Any, Any]) -> Provider:
    """The provider, its loops running.

    Args:
        config: From the stack's configuration.
        deps: Nothing is needed of other APIs.

    Raises:
        InvalidSettings: A folder that can't be used.
        StoreMismatch: The database has another schema.
    """
    runtime = await asyncio.to_thread(compose.build, Settings(**config.model_dump()))
    await asyncio.to_thread(runtime.start)
    return Provider(runtime)


def create_router(impl: Provider) -> APIRouter:
    """The routes, for the stack's own application.

    Args:
        impl: The running service.
    """

    async def serve(request: Request) -> AsyncIterator[None]:
        """Hand the route its services, and its errors to the stack in the form that this knows."""
        request.state.services = impl.runtime.services
        try:
            yield
        except InvalidRequest:
            raise  # the route answers it
        except ServiceError as error:
            raise HTTPException(status_of(error), error.message) from error

    router = APIRouter(dependencies=[Depends(serve)])
    router.include_router(llama_jobs.router)
    router.include_router(llama_datasets.router)
    return router
