"""A job's curves as a matplotlib figure, for notebooks; the package is imported on use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain_service.errors import InvalidRequest

CURVES = ("loss", "validation_loss")
"""What is drawn unless told otherwise."""


def curve(points: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one curve; points without a finite value are left out."""
    found = [(point["step"], point[name]) for point in points if isinstance(point.get(name), int | float) and math.isfinite(point[name])]
    return [step for step, _ in found], [value for _, value in found]


def draw(points: Sequence[Mapping[str, Any]], names: Sequence[str], title: str, axes: Any = None) -> Any:
    """The curves by step, on `axes` or on new ones, which are returned.

    Raises:
        InvalidRequest: matplotlib is not installed.
    """
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise InvalidRequest("plot needs matplotlib, which is not installed: pip install matplotlib") from error
        _, axes = pyplot.subplots()
    for name in names:
        steps, values = curve(points, name)
        if steps:
            axes.plot(steps, values, label=name, marker="o" if len(steps) == 1 else None)
    axes.set_xlabel("step")
    axes.set_title(title)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return axes
