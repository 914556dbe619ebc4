"""What every request model shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

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
