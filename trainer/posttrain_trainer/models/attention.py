"""Attention that keeps documents apart: one causal SDPA per document of a pack, through transformers' AttentionInterface.

Cost grows with the sum of squares of the documents, not of the pack, and there is no mask to build. The lengths travel
as a keyword through the model's forward; a model that does not pass it on is refused, never trained across documents.

Shapes: B rows, Q query heads, K key-value heads, S tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from posttrain_trainer.contract.errors import InvalidArguments

NAME = "posttrain_documents"
"""The implementation's name, for `attn_implementation`."""
LENGTHS = "document_lengths"
"""Keyword that carries the lengths: for one row, its documents; for several rows, None (each row is one document)."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Make `attn_implementation="posttrain_documents"` known to transformers; safe to call again."""
    AttentionInterface.register(NAME, document_attention)


def document_attention(
    module: nn.Module,
    query_BQSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document; returns [B, S, Q, D] and no weights.

    Rows of a padded batch are padded on the right, so causality alone keeps real tokens from seeing padding, and no
    mask is needed: one that is passed is an error rather than a silent leak.

    Raises:
        InvalidArguments: The model did not pass the lengths on, passed a mask, is not causal, or needs soft-capping,
            sinks or a position bias.
    """
    name = type(module).__name__
    if LENGTHS not in kwargs:
        raise InvalidArguments(f"{name} does not pass {LENGTHS} to its attention, so documents of a pack cannot be kept apart")
    if attention_mask is not None:
        raise InvalidArguments(f"{name} was given an attention mask; documents are kept apart by their lengths alone")
    for option in _UNSUPPORTED:
        if kwargs.get(option) is not None:
            raise InvalidArguments(f"{name} needs {option} in its attention, which is not supported")
    if not (kwargs.get("is_causal") if kwargs.get("is_causal") is not None else getattr(module, "is_causal", True)):
        raise InvalidArguments(f"{name} is not causal; only causal language models can be trained")
    groups = query_BQSD.shape[1] // key_BKSD.shape[1]
    if groups > 1:
        key_BKSD = key_BKSD.repeat_interleave(groups, dim=1)
        value_BKSD = value_BKSD.repeat_interleave(groups, dim=1)
    lengths = list(kwargs[LENGTHS] or (query_BQSD.shape[2],))
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query_BQSD, key_BKSD, value_BKSD)), strict=True)
    window = kwargs.get("sliding_window")
    outputs = [_attend(q, k, v, scaling=scaling, dropout=dropout, window=window) for q, k, v in parts]
    output_BQSD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output_BQSD.transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float, window: int | None) -> Tensor:
    """One document: causal, and no further back than `window` tokens (itself included) where there is one."""
    length = query.shape[2]
    if window is None or length <= window:
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling)
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position[None, :]
    mask = (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
