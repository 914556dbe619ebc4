"""Attention that keeps documents apart, through transformers' AttentionInterface: on CUDA one flash attention over all
documents of a pack (Dao et al. 2022, arXiv:2205.14135), elsewhere one causal SDPA per document.

Cost grows with the sum of squares of the documents, not of the pack, and there is no mask to build. The lengths travel
as a keyword through the model's forward; a model that does not pass it on is refused, never trained across documents.

Shapes: B rows, Q query heads, K key-value heads, S tokens, D head size.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.device import Device

NAME = "posttrain_documents"
"""The implementation's name, for `attn_implementation`."""
LENGTHS = "document_lengths"
"""Keyword that carries the lengths: for one row, its documents; for several rows, None (each row is one document)."""

_NAMES = {"sdpa": f"{NAME}_one_by_one", "flash": f"{NAME}_at_once"}  # transformers has plans of its own for names with flash in them
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_HEAD = 256
"""Largest head that flash attention takes."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Make `attn_implementation="posttrain_documents"` known to transformers, and its variants; safe to call again."""
    AttentionInterface.register(NAME, document_attention)
    for kernel, name in _NAMES.items():
        AttentionInterface.register(name, functools.partial(document_attention, kernel=kernel))


def choose(model: Any, kernel: str, device: Device, dtype: torch.dtype) -> None:
    """Let `model` attend by the kernel that was asked for; auto leaves it to the device.

    Args:
        model: The transformers model, loaded with `attn_implementation=NAME`.
        kernel: auto, sdpa or flash.
        device: Where it computes.
        dtype: Precision of the computation.

    Raises:
        InvalidArguments: Flash attention does not run there, or not in that precision.
    """
    if kernel == "auto":
        return
    if kernel == "flash":
        if device.kind != "cuda":
            raise InvalidArguments(f"attention flash needs a CUDA device, and this run is on {device.kind}; use auto or sdpa")
        if dtype not in _VARLEN_DTYPES:
            raise InvalidArguments(f"attention flash computes in bf16, not in {str(dtype).removeprefix('torch.')}; set dtype to bf16, or use auto or sdpa")
    model.set_attn_implementation(_NAMES[kernel])


def document_attention(
    module: nn.Module,
    query_BQSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kernel: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document; returns [B, S, Q, D] and no weights.

    Rows of a padded batch are padded on the right, so causality alone keeps real tokens from seeing padding, and no
    mask is needed: one that is passed is an error rather than a silent leak.

    Raises:
        InvalidArguments: The model did not pass the lengths on, passed a mask, is not causal, or needs soft-capping,
            sinks or a position bias; or flash attention was asked for and cannot do this.
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
    if kernel != "sdpa" and _varlen_serves(query_BQSD, dropout):
        return _varlen(query_BQSD, key_BKSD, value_BKSD, kwargs[LENGTHS], scaling, kwargs.get("sliding_window")), None
    if kernel == "flash":
        raise InvalidArguments(
            f"attention flash cannot serve {name}: it takes heads of up to {_VARLEN_HEAD} numbers without dropout, and a GPU of "
            "compute capability 8.0; use auto or sdpa"
        )
    groups = query_BQSD.shape[1] // key_BKSD.shape[1]
    if groups > 1:
        key_BKSD = key_BKSD.repeat_interleave(groups, dim=1)
        value_BKSD = value_BKSD.repeat_interleave(groups, dim=1)
    lengths = list(kwargs[LENGTHS] or (query_BQSD.shape[2],))
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query_BQSD, key_BKSD, value_BKSD)), strict=True)
    window = kwargs.get("sliding_window")
    # Heads inside tokens, as kernels lay their results out and as what follows wants them: one copy instead of two.
    outputs = [_attend(q, k, v, scaling=scaling, dropout=dropout, window=window).transpose(1, 2) for q, k, v in parts]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).contiguous(), None


def _varlen_serves(query: Tensor, dropout: float) -> bool:
    """Whether torch's flash attention for documents of varying lengths takes this: one kernel for all of a pack."""
    if query.device.type != "cuda" or query.dtype not in _VARLEN_DTYPES or dropout or query.shape[3] > _VARLEN_HEAD:
        return False
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(
    query_BQSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, lengths: tuple[int, ...] | None, scaling: float | None, window: int | None
) -> Tensor:
    """[B, S, Q, D] by `varlen_attn`; rows without lengths are documents of S tokens."""
    from torch.nn.attention.varlen import varlen_attn  # not on every torch, and not needed elsewhere

    rows, heads, tokens, size = query_BQSD.shape
    sizes = lengths or (tokens,) * rows
    ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=query_BQSD.device)
    query, key, value = (tensor.transpose(1, 2).reshape(rows * tokens, -1, size) for tensor in (query_BQSD, key_BKSD, value_BKSD))
    grouped: dict[str, Any] = {"enable_gqa": True} if key_BKSD.shape[1] < heads else {}
    # The window counts itself here, and the kernel's counts only what is to the left.
    reach = (-1 if window is None else window - 1, 0)
    longest = max(sizes)
    output: Any = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=reach, **grouped)
    return output.view(rows, tokens, heads, size)  # type: ignore[no-any-return]


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float, window: int | None) -> Tensor:
    """One document: causal, and no further back than `window` tokens (itself included) where there is one."""
    length = query.shape[2]
    if window is None or length <= window:
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling)
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position[None, :]
    mask = (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
