"""Preference training: the model's log-probabilities of both answers of a pair against those of its reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from posttrain_trainer.contract.methods import DpoMethod
from posttrain_trainer.data.batch import IGNORE, Batch
from posttrain_trainer.data.loader import StepBatches
from posttrain_trainer.dist import World
from posttrain_trainer.losses.cross_entropy import MicroLoss
from posttrain_trainer.losses.preference import METRICS, preference_loss
from posttrain_trainer.losses.sequence import document_logprobs
from posttrain_trainer.models.load import LoadedModel


class Dpo:
    """Direct preference optimisation and its relatives, summed over pairs.

    The reference comes with the batch where it was computed beforehand; else it is the model without its adapter.

    Args:
        method: Loss type and its numbers.
        world: The ranks, over which KTO's KL term is a mean.
    """

    metric_names: tuple[str, ...] = METRICS
    is_likelihood = False

    def __init__(self, method: DpoMethod, world: World) -> None:
        self._method, self._world = method, world
        self._kl_2: Tensor | None = None

    def count(self, of: Batch | StepBatches) -> int:
        """Pairs."""
        return of.num_samples

    def before_step(self, model: LoadedModel, batches: Sequence[Batch]) -> None:
        """For kto_pair: the KL terms over all pairs of the step, by a forward pass of its own. Else nothing."""
        if self._method.loss_type != "kto_pair":
            return
        device = self._world.device.torch_device
        total_2 = torch.zeros(2, device=device)
        with torch.no_grad():
            for batch in (batch.to(device) for batch in batches):
                policy_P2 = self._pairs(log_probabilities(model, batch), batch)
                if batch.num_samples:
                    total_2 += (policy_P2 - self._reference(model, batch)).sum(0)
        *sums, pairs = self._world.sum([*total_2.tolist(), sum(batch.num_samples for batch in batches)])
        self._kl_2 = torch.tensor([max(0.0, value / pairs) for value in sums], device=device)

    def __call__(self, model: LoadedModel, batch: Batch) -> MicroLoss:
        """Loss sum, pairs whose chosen answer has the higher reward, and sums of rewards, of one micro-batch."""
        reference_P2 = self._reference(model, batch)  # first: what keeps memory for the backward pass comes last
        logprobs_D = log_probabilities(model, batch)
        if not batch.num_samples:
            return MicroLoss(logprobs_D.sum() * 0.0, batch.labels_BS.new_zeros(()), logprobs_D.new_zeros(len(METRICS)))
        return preference_loss(self._pairs(logprobs_D, batch), reference_P2, self._method, self._kl_2)

    def _reference(self, model: LoadedModel, batch: Batch) -> Tensor:
        """fp32 [P, 2]."""
        if self._method.reference_free or (not batch.num_samples and batch.reference_P2 is None and self._method.precompute_reference):
            return torch.zeros(batch.num_samples, 2, device=batch.labels_BS.device)
        if batch.reference_P2 is not None:
            reference_P2 = batch.reference_P2
            return reference_P2 / self._lengths(batch) if self._method.loss_type == "ipo" else reference_P2
        with torch.no_grad(), model.without_adapter():
            return self._pairs(log_probabilities(model, batch), batch)

    def _pairs(self, logprobs_D: Tensor, batch: Batch) -> Tensor:
        """[P, 2] of [D], per token for ipo; of a rank without data, none."""
        pairs_P2 = logprobs_D[: 2 * batch.num_samples].view(-1, 2)
        return pairs_P2 / self._lengths(batch) if self._method.loss_type == "ipo" else pairs_P2

    @staticmethod
    def _lengths(batch: Batch) -> Tensor:
        """Supervised tokens of each answer, [P, 2]; at least one each, for shorter pairs are not trained on."""
        numbers_N = batch.document_of_each()[batch.labels_BS != IGNORE]
        return torch.bincount(numbers_N, minlength=2 * batch.num_samples)[: 2 * batch.num_samples].view(-1, 2)


def log_probabilities(model: LoadedModel, batch: Batch) -> Tensor:
    """Log-probability of each document of a batch, summed over its supervised tokens: fp32 [D]."""
    document_N = batch.document_of_each()[batch.labels_BS != IGNORE]
    if not len(document_N):  # the one position that a batch without labels hands to its loss
        document_N = batch.labels_BS.new_zeros(1)
    result: Tensor = model.module(batch, partial(document_logprobs, document_N=document_N, num_documents=len(batch.lengths)))
    return result
