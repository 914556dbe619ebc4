"""Activation checkpointing of transformer blocks: less memory, one more forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(blocks: Sequence[nn.Module]) -> None:
    """Recompute each block's activations in its backward pass (Chen et al. 2016, arXiv:1604.06174), in place.

    Call before sharding: the block's own forward is replaced, so that FSDP's hooks stay outside of what is recomputed.
    Parameter names do not change, unlike with a wrapper module.
    """
    for block in blocks:
        block.forward = functools.partial(_recomputing, block.forward)


def _recomputing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
