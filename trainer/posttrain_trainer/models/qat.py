"""Quantisation-aware training by torchao: linear layers compute with weights rounded as they will be, gradients pass through.

The rounding is `torchao`'s for the configurations that quantise the trained model afterwards, so both agree. Weights
stay what they are; an export is an ordinary model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.methods import QatArguments


def base_config(args: QatArguments) -> Any:
    """The configuration that `torchao.quantization.quantize_` takes to quantise the trained model.

    Raises:
        InvalidArguments: torchao is not installed.
    """
    try:
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup
    except ImportError as error:
        raise InvalidArguments(f"qat needs the package torchao, which cannot be imported ({error}); install posttrain[train]") from error
    group = PerGroup(args.group_size)
    if args.quantizer_name == "8da4w":
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=_dtype(4), weight_granularity=group)
    return IntxWeightOnlyConfig(weight_dtype=_dtype(4 if args.quantizer_name == "int4" else 8), granularity=group)


def prepare_qat(model: nn.Module, args: QatArguments) -> str:
    """Let all linear layers but the output head compute with rounded weights, in place; returns what was done.

    Raises:
        InvalidArguments: torchao is missing, or a layer's input width is no multiple of the group size.
    """
    config = base_config(args)
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    chosen = quantised_layers(model)
    odd = [f"{name} ({layer.in_features})" for name, layer in chosen.items() if layer.in_features % args.group_size]
    if odd:
        raise InvalidArguments(f"qat.group_size {args.group_size} does not divide the input width of {len(odd)} layers, e.g. {odd[0]}; choose another")
    if not chosen:
        raise InvalidArguments("qat: this model has no linear layers to quantise")
    quantize_(model, QATConfig(config, step="prepare"), filter_fn=lambda _, name: name in chosen)
    return f"{len(chosen)} linear layers train for {args.quantizer_name} in groups of {args.group_size}; checkpoints hold plain weights"


def quantised_layers(model: Any) -> dict[str, nn.Linear]:
    """The layers that quantisation is about, by name: all linear ones but the output head."""
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}


def _dtype(bits: int) -> torch.dtype:
    found: torch.dtype = getattr(torch, f"int{bits}")  # torch's type stubs don't know those below 8 bits
    return found
