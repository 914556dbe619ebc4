"""Supervised fine-tuning: cross entropy of the tokens that carry labels."""

from __future__ import annotations

from posttrain_trainer.data.batch import Batch
from posttrain_trainer.losses.cross_entropy import MicroLoss, cross_entropy
from posttrain_trainer.models.load import LoadedModel


class Sft:
    """Next-token cross entropy over supervised positions, summed."""

    def __call__(self, model: LoadedModel, batch: Batch) -> MicroLoss:
        """Loss sum and correct guesses of one micro-batch; also used, without gradients, for validation."""
        result: MicroLoss = model.module(batch, cross_entropy)
        return result
