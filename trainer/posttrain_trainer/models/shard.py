"""FSDP2: `fully_shard` on every transformer block and the root, mixed precision, host offload. One rank is the same path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.spec import FsdpArguments
from posttrain_trainer.dist import World
from posttrain_trainer.models.quant import quantised_parameters


def check_sharding(args: FsdpArguments, world: World) -> None:
    """Refuse what this device cannot do, by name, before weights are loaded.

    Raises:
        InvalidArguments: Host offload on the host itself, several ranks (or offload) on a device without FSDP2, or groups
            that do not divide the ranks into several copies.
    """
    device = world.device
    if args.cpu_offload and device.kind == "cpu":
        raise InvalidArguments("fsdp.cpu_offload has no meaning on device cpu, whose memory is the host's; set it to false")
    if not device.can_shard and world.world_size > 1:
        raise InvalidArguments(f"device {device.kind} trains on one rank only, not on {world.world_size}; set nproc_per_node to 1")
    if not device.can_shard and args.cpu_offload:
        raise InvalidArguments(f"fsdp.cpu_offload is not available on device {device.kind}; set it to false")
    if args.sharding == "hybrid":
        size = args.shard_ranks or world.local_world_size
        if size < 2 or size >= world.world_size or world.world_size % size:
            given = f"fsdp.shard_ranks is {size}" if args.shard_ranks else f"fsdp.shard_ranks is not given, and a host has {size}"
            raise InvalidArguments(
                f"fsdp.sharding hybrid needs groups of at least 2 ranks that divide all {world.world_size} into several copies, but {given}; use full or none"
            )


def shard(root: nn.Module, blocks: Sequence[nn.Module], args: FsdpArguments, world: World, dtype: torch.dtype) -> None:
    """Shard `blocks` and `root` over the ranks, in place: compute in `dtype`, reduce gradients in fp32.

    `sharding: none` is a mesh of whole copies whose gradients are averaged, and hybrid one of copies by shards (HSDP; Zhao
    et al. 2023, arXiv:2304.11277), so that every choice is one path. Tied
    parameters stay one parameter, since both ends belong to the root. On a device without FSDP2 the module is only
    moved there, and computes in `dtype` by autocast. Quantised weights stay whole on every rank. Where `is_alone` says so,
    the module stays as it is.

    Args:
        root: Its forward must do everything that touches parameters outside the blocks, the head included.
        blocks: Transformer blocks inside `root`, in order.
        args: What is sharded, and whether it lives in host memory.
        world: The ranks.
        dtype: Precision of parameters and activations in forward and backward.
    """
    if not world.device.can_shard:
        root.to(world.device.torch_device)
        return
    if is_alone(root, world, dtype):
        return
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    offload = CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy()
    mesh = world.mesh(shard_ranks_of(args, world))
    reshard = args.sharding in ("full", "hybrid")
    packed = quantised_parameters(root)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload, ignored_params=packed)
    # The head's backward follows its forward at once: freeing the root's parameters in between would gather them twice.
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload, ignored_params=packed)


def is_alone(root: nn.Module, world: World, dtype: torch.dtype) -> bool:
    """Whether FSDP would do nothing but copy: one rank of the CPU that computes in fp32, which its weights are in.

    Its steps are bit for bit those of FSDP, without gathering and scattering all weights within the one process. In other
    precisions FSDP keeps what training needs: weights in fp32, and gradients of several micro-batches summed in fp32.
    """
    same = dtype == torch.float32 and all(p.dtype == dtype for p in root.parameters())
    return world.world_size == 1 and world.device.kind == "cpu" and same


def shard_ranks_of(args: FsdpArguments, world: World) -> int | None:
    """Neighbouring ranks that share one copy of the model; None = all."""
    return {"none": 1, "hybrid": args.shard_ranks or world.local_world_size}.get(args.sharding)


def set_gradient_sync(root: nn.Module, last: bool) -> None:
    """Reduce gradients over ranks in the next backward (`last`), or only add them up here; the same on every rank."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)


def free_gathered(root: nn.Module) -> None:
    """Give back parameters that a forward pass without a backward left gathered; what looks at `root` then sees shards."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def find_blocks(model: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """The transformer blocks: modules of the classes that the model says must not be split, in order.

    Raises:
        InvalidArguments: The model names none, or has none of them.
    """
    blocks = [module for module in model.modules() if type(module).__name__ in set(class_names)]
    if not blocks:
        raise InvalidArguments(f"{type(model).__name__} does not say what its transformer blocks are; it cannot be sharded")
    return blocks
