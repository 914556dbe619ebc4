"""The frozen base of an adapter in 4 bits: NF4 with doubly quantised scales, by bitsandbytes (QLoRA, arXiv:2305.14314).

Quantised weights are not sharded: each rank holds all of them, at about half a byte each, and only adapters and what
is not quantised (embedding, norms, head) go through FSDP.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.device import Device

_DEVICES = ("cpu", "cuda", "xpu")


def quantised_loading(args: FullTrainingArguments, device: Device, dtype: torch.dtype) -> dict[str, Any]:
    """Further keywords for `from_pretrained`; none where nothing is to be quantised.

    Raises:
        InvalidArguments: bitsandbytes is not installed, or this device or kind of sharding is not for it.
    """
    if args.lora is None or not args.lora.quantize_base:
        return {}
    if find_spec("bitsandbytes") is None:
        raise InvalidArguments("lora.quantize_base needs the package bitsandbytes, which is not installed; install posttrain[quant], or leave it out")
    if device.kind not in _DEVICES:
        raise InvalidArguments(f"lora.quantize_base does not run on device {device.kind}, only on {', '.join(_DEVICES)}; leave it out")
    if args.fsdp.cpu_offload:
        raise InvalidArguments("lora.quantize_base keeps the quantised weights on the device; leave fsdp.cpu_offload out")
    # Imported here: looking for quantisation packages takes time that most runs need not pay.
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": device.torch_device}}


def quantised_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that are packed bytes: they can be neither sharded nor cast."""
    return {parameter for parameter in module.parameters() if not parameter.is_floating_point()}


def count_of(parameter: nn.Parameter) -> int:
    """Weights in a parameter; a packed byte holds two."""
    return parameter.numel() if parameter.is_floating_point() else 2 * parameter.numel()
