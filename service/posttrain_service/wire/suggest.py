"""What a field that isn't there was most likely meant to be. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

NO_FIELD = "no such field"
"""How the message of an unknown field begins."""
_DEPTH = 3
_LIKENESS = 0.6


def with_suggestions(faults: Sequence[dict[str, Any]], model: object) -> list[dict[str, Any]]:
    """The same faults; those of unknown fields name the field that was most likely meant, where there is one.

    Args:
        faults: `{"loc", "message"}`, locations as dotted paths.
        model: What was validated; anything but a model leaves the faults as they are.
    """
    told = []
    for fault in faults:
        meant = nearest(model, fault["loc"]) if str(fault["message"]).startswith(NO_FIELD) else None
        told.append(fault if meant is None else {**fault, "message": f"{NO_FIELD}; did you mean {meant}?"})
    return told


def nearest(model: object, path: str) -> str | None:
    """The dotted path of a field that `path` may have been meant for: one of a like name beside it, or the same name elsewhere."""
    *parents, name = path.split(".")
    here = list(_models(model))
    for part in parents:
        if not part.isdecimal():
            here = [inner for one in here if part in one.model_fields for inner in _models(one.model_fields[part].annotation)]
    beside = sorted({field for one in here for field in one.model_fields})
    if like := difflib.get_close_matches(name, beside, n=1, cutoff=_LIKENESS):
        return ".".join([*parents, like[0]])
    return next((found for found in _paths(model, _DEPTH) if found.rpartition(".")[2] == name and found != path), None)


def _paths(annotation: object, depth: int) -> Iterator[str]:
    """Dotted paths of all fields, the outer ones first."""
    inner: list[str] = []
    for one in _models(annotation):
        for name, info in one.model_fields.items():
            yield name
            if depth > 1:
                inner += (f"{name}.{path}" for path in _paths(info.annotation, depth - 1))
    yield from inner


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """The models that a value of this type may be, through unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _models(part)
