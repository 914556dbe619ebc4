"""Metrics points as JSON objects and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain_service.wire.text import finite
from posttrain_service.wire.times import iso

_INTERNAL = ("v",)


def point_json(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point as clients see it: `time` in ISO 8601, the record's schema version left out, NaN as null."""
    shown = {key: value for key, value in point.items() if key not in _INTERNAL}
    if isinstance(shown.get("time"), int | float):
        shown["time"] = _time(shown["time"])
    cleaned: dict[str, Any] = finite(shown)
    return cleaned


def _time(seconds: float) -> str | None:
    """A time that no date can show is none: the record is a program's, not ours."""
    try:
        return iso(seconds)
    except (OverflowError, ValueError, OSError):
        return None


def columns(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every key of the points in order of first sight, `step` first."""
    seen: dict[str, None] = {"step": None}
    for point in points:
        seen.update(dict.fromkeys(point))
    return list(seen)


def points_csv(points: Sequence[Mapping[str, Any]]) -> str:
    """The points as CSV: a header row with the keys of the JSON points, one row a step, empty where a point lacks a key."""
    shown = [point_json(point) for point in points]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(shown), lineterminator="\r\n", restval="")
    writer.writeheader()
    writer.writerows(shown)
    return text.getvalue()
