"""Log-probabilities of whole documents, for losses that compare answers.

Shapes: N supervised positions, C positions of a chunk, D documents, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain_trainer.losses.cross_entropy import CHUNK, IGNORE, LogitTransform


def document_logprobs(
    hidden_NH: Tensor, labels_N: Tensor, head: nn.Module, transform: LogitTransform | None = None,
    *, document_N: Tensor, num_documents: int, chunk: int = CHUNK,
) -> Tensor:  # fmt: skip
    """Log-probability of each document's supervised tokens, summed: fp32 [D].

    Logits live one chunk long, and are made again in the backward pass.

    Args:
        hidden_NH: Last hidden states at the positions that may carry labels.
        labels_N: int64 token ids; -100 = not counted.
        head: Maps [*, H] to logits [*, V].
        transform: Applied to the logits; None = nothing.
        document_N: int64, the document that each position belongs to.
        num_documents: D.
        chunk: Positions per chunk.
    """

    def one(hidden_CH: Tensor, labels_C: Tensor) -> Tensor:
        logits_CV = head(hidden_CH)
        logits_CV = (logits_CV if transform is None else transform(logits_CV)).float()
        counted_C = labels_C != IGNORE
        chosen_C = logits_CV.gather(1, labels_C.clamp(min=0).unsqueeze(1)).squeeze(1)
        return torch.where(counted_C, chosen_C - logits_CV.logsumexp(-1), 0.0)

    parts = [
        checkpoint(one, hidden_CH, labels_C, use_reentrant=False)
        for hidden_CH, labels_C in zip(torch.split(hidden_NH, chunk), torch.split(labels_N, chunk), strict=True)
    ]
    return hidden_NH.new_zeros(num_documents, dtype=torch.float32).index_add(0, document_N, torch.cat(parts))
