"""Liveness, readiness, version, and numbers for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import Use, only
from posttrain_service.wire import shapes

router = APIRouter(tags=["service"])


@router.get("/health/live", responses={200: {"model": shapes.Health}}, dependencies=[only()])
def live(services: Use) -> Response:
    """Whether the process answers."""
    return Answer(services.health.live())


@router.get(
    "/health/ready",
    responses={200: {"model": shapes.Health}, 503: {"model": shapes.Health, "description": "Something is missing."}},
    dependencies=[only()],
)
def ready(services: Use) -> Response:
    """Whether jobs can be taken: store writable, loops alive, schema current, disk above the reserve."""
    good, report = services.health.ready()
    return Answer(report, 200 if good else 503)


@router.get("/version", responses={200: {"model": shapes.Version}}, dependencies=[only()])
def version(services: Use) -> Response:
    """Versions of service, contract, interpreter and trainer."""
    return Answer(services.health.version())


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    dependencies=[only()],
)
def prometheus(request: Request, services: Use) -> Response:
    """Counters, histograms and gauges for Prometheus: everything for who sees everybody's jobs, else what is theirs."""
    body, content_type = services.health.metrics(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
