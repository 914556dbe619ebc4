"""What an objective is: one micro-batch in, summed loss and counts out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from posttrain_trainer.data.batch import Batch
from posttrain_trainer.data.loader import StepBatches
from posttrain_trainer.losses.cross_entropy import MicroLoss
from posttrain_trainer.models.load import LoadedModel


class Objective(Protocol):
    """Says what is learned; the loop says when, divides by the global count and steps."""

    metric_names: tuple[str, ...]
    """Fields of `MetricsPoint` that `MicroLoss.extra` sums up."""
    is_likelihood: bool
    """Whether the mean loss is that of tokens, so that its exponential is a perplexity."""

    def count(self, of: Batch | StepBatches) -> int:
        """What loss, right guesses and further sums of a micro-batch or step are divided by in the end."""
        ...

    def before_step(self, model: LoadedModel, batches: Sequence[Batch]) -> None:
        """Called on every rank with all its micro-batches of a step (or of a validation) before the first of them."""
        ...

    def __call__(self, model: LoadedModel, batch: Batch) -> MicroLoss:
        """Run the model on one micro-batch of this rank; called the same number of times on every rank."""
        ...
