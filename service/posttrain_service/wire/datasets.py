"""What `POST /post_training/datasets/validate` takes, and its answer as it stands in openapi.yaml."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, model_validator

from posttrain_service.wire.base import Name, Wire
from posttrain_service.wire.jobs import DatasetRef
from posttrain_service.wire.shapes import ErrorItem, Shape
from posttrain_trainer.contract.base import Disagreement
from posttrain_trainer.contract.conversation import TrainOn
from posttrain_trainer.contract.methods import Method


class ValidateRequest(Wire):
    """A data set to look at."""

    dataset: DatasetRef
    """Id of an uploaded file, or the rows themselves."""
    model: Name | None = None
    """A model whose tokenizer counts the tokens; None = they are not counted."""
    method: Method | None = None
    """The method that the rows are for; None = sft."""
    train_on: TrainOn = "assistant"
    """Which turns of conversations are learned, as in training.train_on: a row without any is a bad one."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.method is not None and self.method.kind != "sft" and self.train_on != "assistant":
            raise Disagreement(
                "{train_on} has no effect with {method} {kind}, which says itself what is learned; leave it out",
                kind=repr(self.method.kind),
            )
        return self


class RowsRemark(Shape):
    """Something odd about rows."""

    message: str
    """What they hold."""
    rows: int
    """How many do."""
    lines: list[int]
    """Where the first of them begin."""


class DatasetReport(Shape):
    """What a look at a data set found."""

    model_config = ConfigDict(extra="allow")

    valid: bool
    """Whether a job would take it."""
    rows: int
    """Rows that were found."""
    format: str | None
    """The row format."""
    errors: list[ErrorItem]
    """The first faults."""
    num_errors: int
    """Faults in all."""
    ignored: dict[str, int]
    """Keys that mean nothing, with the number of rows that hold them."""
    warnings: list[RowsRemark]
    """What is odd about rows that can be trained on."""
    tokens: dict[str, Any] | None = None
    """Counts by the model's tokenizer, when one was named."""
