"""Less device memory for activations of transformer blocks: computed again, or kept in host memory meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.device import Device

_WORTH_MOVING_BYTES = 2**16


def checkpoint_activations(blocks: Sequence[nn.Module]) -> None:
    """Recompute each block's activations in its backward pass (Chen et al. 2016, arXiv:1604.06174), in place.

    Call before sharding: the block's own forward is replaced, so that FSDP's hooks stay outside of what is recomputed.
    Parameter names do not change, unlike with a wrapper module.
    """
    for block in blocks:
        block.forward = functools.partial(_recomputing, block.forward)


def check_offloading(device: Device) -> None:
    """Refuse to move activations to where they are.

    Raises:
        InvalidArguments: The device's memory is the host's.
    """
    if device.kind in ("cpu", "mps"):
        raise InvalidArguments(f"activation_offloading has no meaning on device {device.kind}, whose memory is the host's; set it to false")


def offload_activations(blocks: Sequence[nn.Module]) -> None:
    """Keep what each block saves for its backward pass in (pinned) host memory until then, in place.

    Weights are left where they are: FSDP gathers them again. After `checkpoint_activations`, only the inputs of blocks are
    saved, and moved. Call before sharding, as that.
    """
    for block in blocks:
        block.forward = functools.partial(_offloading, block, block.forward)


def _offloading(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if _on_host(tensor) or tensor.nbytes < _WORTH_MOVING_BYTES or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        return tensor.device, host.copy_(tensor)

    with saved_tensors_hooks(pack, _unpack):
        return forward(*args, **kwargs)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept[1].to(kept[0], non_blocking=True)


def _recomputing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
