"""`create_app`: settings to a FastAPI application whose lifespan runs the loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import yaml
from fastapi import Depends, FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from posttrain_service import __version__, compose
from posttrain_service.api import (
    checkpoints,
    datasets,
    errors,
    files,
    fine_tuning,
    health,
    job_streams,
    llama_datasets,
    llama_jobs,
    models,
    post_training,
    uploads,
)
from posttrain_service.api.auth import Gate, describe
from posttrain_service.api.deps import name_job
from posttrain_service.api.edge import Edge
from posttrain_service.api.measure import Measure, watch_lag
from posttrain_service.api.trace import Trace
from posttrain_service.errors import InvalidSettings
from posttrain_service.logs import set_up_logging
from posttrain_service.settings import Settings
from posttrain_service.web import pages
from posttrain_service.wire import shapes
from posttrain_service.work.services import Services

_ROUTERS = (
    post_training.router,
    job_streams.router,
    checkpoints.router,
    datasets.router,
    files.router,
    uploads.router,
    fine_tuning.router,
    models.router,
    llama_jobs.router,
    llama_datasets.router,
    health.router,
)


class Running(Protocol):
    """What the lifespan starts and stops: the services and the loops behind them."""

    @property
    def services(self) -> Services:
        """The use cases."""

    def start(self) -> None:
        """Start the loops; blocks until they run."""

    def stop(self) -> None:
        """Stop the loops, and leave the jobs running; blocks until they stand."""


def create_app(settings: Settings | None = None, *, build: Callable[[Settings], Running] = compose.build) -> FastAPI:
    """The application. Nothing is opened before its lifespan begins.

    Args:
        settings: What the service is told; None = read from the environment.
        build: Makes what the lifespan starts; tests hand in another one.

    Raises:
        InvalidSettings: The service would be reachable from other machines, and there are no keys.
    """
    told = Settings() if settings is None else settings
    if settings is None:  # uvicorn's or another server's factory: its own logging knows nothing of ids and keys
        set_up_logging(told.log_format, told.log_level)
    check_reach(told)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = await run_in_threadpool(build, told)
        try:
            await run_in_threadpool(running.start)
            app.state.services = running.services
            watch = asyncio.create_task(watch_lag(running.services.meters))
            try:
                yield
            finally:
                watch.cancel()
        finally:
            running.services.streams.close()
            await run_in_threadpool(running.stop)

    app = FastAPI(
        title="posttrain",
        summary="Fine-tuning jobs over HTTP.",
        version=__version__,
        docs_url=None,  # its page loads scripts from another host
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(name_job)],
        generate_unique_id_function=_operation_id,
        responses={"4XX": {"model": shapes.Error}, "5XX": {"model": shapes.Error}},
    )
    errors.install(app)
    for router in _ROUTERS:
        app.include_router(router)
    pages.install(app)
    describe(app)
    app.add_middleware(Gate, services=lambda: app.state.services)
    app.add_middleware(Trace, traces=lambda: app.state.services.traces)
    app.add_middleware(Edge, loopback=told.is_loopback, root_path=told.root_path)
    app.add_middleware(Measure, meters=lambda: app.state.services.meters)
    return app


def check_reach(settings: Settings) -> None:
    """Refuse an address that other machines can reach as long as there is no key that would tell them apart.

    Raises:
        InvalidSettings: `host` is not a loopback address, and no key is good.
    """
    if not settings.is_loopback and not compose.has_keys(settings):
        raise InvalidSettings(
            f"host {settings.host!r} can be reached from other machines, and there are no API keys: whoever reaches the "
            "service could run training on it. Make a key first, by `posttrain keys create --owner NAME`, with the same "
            "storage directory or database; or listen on 127.0.0.1"
        )


def openapi_yaml() -> str:
    """The text of openapi.yaml for this build."""
    described: dict[str, Any] = create_app(Settings(host="127.0.0.1", root_path="")).openapi()
    return yaml.safe_dump(described, sort_keys=False, allow_unicode=True, width=120)


def _operation_id(route: APIRoute) -> str:
    return route.name
