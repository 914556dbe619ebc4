"""What every request model shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from posttrain_trainer.contract.base import Model

JOB_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Form of a client-chosen job id."""

NAME = r"^[^\x00-\x1f\x7f]+$"
"""Text without control characters."""

Name = Annotated[str, Field(min_length=1, max_length=300, pattern=NAME)]
"""A name without control characters."""


class Wire(Model):
    """Base of request models: frozen, and an unknown field is an error, so that nothing is silently ignored; true is no number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), validate_default=True
    )


class Lenient(Model):
    """Base of the requests of other services' APIs: frozen, and unknown fields are kept aside for a warning."""

    model_config = ConfigDict(
        frozen=True, extra="allow", use_attribute_docstrings=True, protected_namespaces=(), validate_default=True
    )


def unknown_fields(model: BaseModel, path: str = "") -> Iterator[str]:
    """Dotted names of fields that nothing is known of, at any depth."""
    yield from (f"{path}{name}" for name in model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, BaseModel):
                yield from unknown_fields(item, f"{path}{name}.")


def no_effect(model: BaseModel) -> tuple[str, ...]:
    """A warning for each field that nothing is known of."""
    return tuple(f"{name} is not known to this server and has no effect" for name in unknown_fields(model))
