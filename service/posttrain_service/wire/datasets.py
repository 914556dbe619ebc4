"""What `POST /post_training/datasets/validate` takes."""

from __future__ import annotations

from posttrain_service.wire.base import Name, Wire
from posttrain_service.wire.jobs import DatasetRef
from posttrain_trainer.contract.methods import Method


class ValidateRequest(Wire):
    """A data set to look at."""

    dataset: DatasetRef
    """Id of an uploaded file, or the rows themselves."""
    model: Name | None = None
    """A model whose tokenizer counts the tokens; None = they are not counted."""
    method: Method | None = None
    """The method that the rows are for; None = sft."""
