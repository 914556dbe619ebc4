"""What an objective is: one micro-batch in, summed loss and counts out."""

from __future__ import annotations

from typing import Protocol

from posttrain_trainer.data.batch import Batch
from posttrain_trainer.losses.cross_entropy import MicroLoss
from posttrain_trainer.models.load import LoadedModel


class Objective(Protocol):
    """Says what is learned; the loop says when, divides by the global count and steps."""

    def __call__(self, model: LoadedModel, batch: Batch) -> MicroLoss:
        """Run the model on one micro-batch of this rank; called the same number of times on every rank."""
        ...
