"""Response shapes of /v1/models as they stand in openapi.yaml."""

from __future__ import annotations

from typing import Literal

from posttrain_service.wire.shapes import Listing, Shape


class Model(Shape):
    """OpenAI's Model object, and where it comes from."""

    id: str
    """What a job's `model` names it by."""
    object: Literal["model"]
    """model."""
    created: int
    """Unix seconds."""
    owned_by: str
    """Whose job made it; local for a base model."""
    kind: Literal["base", "full", "adapter"]
    """A base model, a job's whole model, or a job's PEFT adapter."""
    trainable: bool
    """Whether a further job may start from it; an adapter may when it was merged."""
    job_uuid: str | None
    """The job that made it."""
    checkpoint: str | None
    """The checkpoint of that job which it is."""


class ModelList(Listing):
    """Models."""

    object: Literal["list"]
    """list."""
    data: list[Model]
    """Base models by name, then results, newest first."""


class ModelDeleted(Shape):
    """A model is gone."""

    id: str
    """Its name."""
    object: Literal["model"]
    """model."""
    deleted: bool
    """True."""
