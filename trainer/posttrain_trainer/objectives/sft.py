"""Supervised fine-tuning and continued pretraining: cross entropy of the tokens that carry labels."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain_trainer.data.batch import Batch
from posttrain_trainer.data.loader import StepBatches
from posttrain_trainer.losses.cross_entropy import MicroLoss, cross_entropy
from posttrain_trainer.models.load import LoadedModel


class Sft:
    """Next-token cross entropy over supervised positions, summed."""

    metric_names: tuple[str, ...] = ()
    is_likelihood = True

    def count(self, of: Batch | StepBatches) -> int:
        """Supervised tokens."""
        return of.num_supervised

    def before_step(self, model: LoadedModel, batches: Sequence[Batch]) -> None:
        """Nothing has to be known about the step as a whole."""

    def __call__(self, model: LoadedModel, batch: Batch) -> MicroLoss:
        """Loss sum and correct guesses of one micro-batch; also used, without gradients, for validation."""
        result: MicroLoss = model.module(batch, cross_entropy)
        return result
