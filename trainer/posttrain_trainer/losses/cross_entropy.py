"""Cross entropy from hidden states: logits only in chunks of supervised positions, sums instead of means.

Shapes: N supervised positions, C positions of a chunk, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORE = -100
CHUNK = 256
"""Positions whose logits exist at one time: 256 x 49,152 in fp32 are 50 MB, small enough for caches to matter."""

LogitTransform = Callable[[Tensor], Tensor]


class MicroLoss(NamedTuple):
    """What one micro-batch of one rank yields; sums, so that the mean can be taken once over the global batch."""

    loss_sum: Tensor
    """fp32 scalar: negative log-likelihood summed over supervised tokens, with its graph."""
    num_correct: Tensor
    """int64 scalar: supervised tokens that no other was likelier than (of pairs: those whose chosen answer has the higher reward)."""
    extra: Tensor | None = None
    """fp32 [K]: sums of the objective's further metrics, where it has any."""


def cross_entropy(
    hidden_NH: Tensor, labels_N: Tensor, head: nn.Module, transform: LogitTransform | None = None, *, chunk: int = CHUNK
) -> MicroLoss:
    """Summed cross entropy of `head(hidden)` against labels; peak memory is one chunk of logits, whatever N is.

    A plain linear head takes the fused path, whose gradients are made in the forward pass chunk by chunk (as in
    Liger Kernel, Hsu et al. 2024, arXiv:2410.10989); any other head or a logit transform recomputes chunks in backward.

    Args:
        hidden_NH: Last hidden states at the positions that may carry labels.
        labels_N: int64 token ids; -100 = not counted.
        head: Maps [*, H] to logits [*, V].
        transform: Applied to the logits, e.g. soft-capping; None = nothing.
        chunk: Positions per chunk.
    """
    if type(head) is nn.Linear and head.bias is None and transform is None:
        loss_sum, num_correct = _LinearCrossEntropy.apply(hidden_NH, head.weight, labels_N, chunk)
        return MicroLoss(loss_sum, num_correct)
    return _recomputed(hidden_NH, labels_N, head, transform, chunk)


def _recomputed(hidden_NH: Tensor, labels_N: Tensor, head: nn.Module, transform: LogitTransform | None, chunk: int) -> MicroLoss:
    def one(hidden_CH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = head(hidden_CH)
        if transform is not None:
            logits_CV = transform(logits_CV)
        loss = functional.cross_entropy(logits_CV.float(), labels_C, ignore_index=IGNORE, reduction="sum")
        likeliest_C = logits_CV.gather(1, labels_C.clamp(min=0).unsqueeze(1)).squeeze(1) == logits_CV.amax(-1)
        return loss, (likeliest_C & (labels_C != IGNORE)).sum()

    loss_sum = hidden_NH.new_zeros((), dtype=torch.float32)
    num_correct = labels_N.new_zeros(())
    for hidden_CH, labels_C in zip(torch.split(hidden_NH, chunk), torch.split(labels_N, chunk), strict=True):
        loss, correct = checkpoint(one, hidden_CH, labels_C, use_reentrant=False)
        loss_sum, num_correct = loss_sum + loss, num_correct + correct
    return MicroLoss(loss_sum, num_correct)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of `hidden @ weight.T`, gradients of both made in the forward pass, logits alive one chunk long."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        if torch.is_autocast_enabled(hidden_NH.device.type):
            compute = torch.get_autocast_dtype(hidden_NH.device.type)
        else:
            compute = hidden_NH.dtype
        hidden_grad_NH = torch.empty_like(hidden_NH) if need_hidden else None
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        weight = weight_VH.to(compute)
        loss_sum = hidden_NH.new_zeros((), dtype=torch.float32)
        num_correct = labels_N.new_zeros(())
        for start in range(0, len(labels_N), chunk):
            part = slice(start, start + chunk)
            hidden_CH, labels_C = hidden_NH[part].to(compute), labels_N[part]
            loss, correct, grad_CV = _chunk(hidden_CH, weight, labels_C)
            loss_sum, num_correct = loss_sum + loss, num_correct + correct
            if hidden_grad_NH is not None:
                hidden_grad_NH[part] = grad_CV @ weight
            if weight_grad_VH is not None:
                if compute == torch.float32:
                    weight_grad_VH.addmm_(grad_CV.T, hidden_CH)
                else:
                    weight_grad_VH += grad_CV.T @ hidden_CH
        ctx.grads = hidden_grad_NH, weight_grad_VH  # not saved as tensors: they are no activations, and are scaled in place
        ctx.weight_dtype = weight_VH.dtype
        ctx.mark_non_differentiable(num_correct)
        return loss_sum, num_correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _grad_correct: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of this cross entropy were given out already; it takes one backward pass")
        (hidden_grad_NH, weight_grad_VH), ctx.grads = ctx.grads, None
        if hidden_grad_NH is not None:
            hidden_grad_NH.mul_(grad_loss.to(hidden_grad_NH.dtype))
        if weight_grad_VH is not None:
            weight_grad_VH = weight_grad_VH.mul_(grad_loss).to(ctx.weight_dtype)  # scaled in fp32 before it is rounded
        return hidden_grad_NH, weight_grad_VH, None, None


def _chunk(hidden_CH: Tensor, weight_VH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, correct guesses, and d(loss)/d(logits) [C, V] in the computing precision.

    The logits become their gradient in place, in as few passes over memory as there are: the whole of it is larger than any
    cache, and next to the matrix product each pass is dear.
    """
    with torch.autocast(hidden_CH.device.type, enabled=False):
        logits_CV = (hidden_CH @ weight_VH.T).float()
        counted_C1 = (labels_C != IGNORE).unsqueeze(1)
        target_C1 = labels_C.clamp(min=0).unsqueeze(1)
        chosen_C1 = logits_CV.gather(1, target_C1)
        top_C1 = logits_CV.amax(-1, keepdim=True)
        correct = ((chosen_C1 == top_C1) & counted_C1).sum()
        grad_CV = logits_CV.sub_(top_C1).exp_()
        sum_C1 = grad_CV.sum(-1, keepdim=True)
        loss = torch.where(counted_C1, top_C1 + sum_C1.log() - chosen_C1, 0.0).sum()
        grad_CV.mul_(counted_C1 / sum_C1)
        grad_CV.scatter_add_(1, target_C1, -counted_C1.to(grad_CV.dtype))
        return loss, correct, grad_CV.to(hidden_CH.dtype)
