"""Liveness, readiness, version, and numbers for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from posttrain_service.api.answers import Answer
from posttrain_service.api.deps import Use, only
from posttrain_service.wire import shapes

router = APIRouter(tags=["service"])

_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


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
def prometheus(services: Use) -> Response:
    """Gauges in Prometheus' text format."""
    text = "".join(_gauges(services.health.numbers()))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _gauges(numbers: Mapping[str, Any]) -> Iterator[str]:
    """A number is a gauge; a mapping of numbers is a gauge with one label named `kind`."""
    for name, value in numbers.items():
        metric = f"posttrain_{_UNFIT.sub('_', name)}"
        samples = value.items() if isinstance(value, Mapping) else [("", value)]
        yield f"# TYPE {metric} gauge\n"
        for label, number in samples:
            if number is None:
                continue
            escaped = str(label).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            yield f'{metric}{{kind="{escaped}"}} {float(number)}\n' if label != "" else f"{metric} {float(number)}\n"
