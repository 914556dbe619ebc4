"""What people load: the model in Hugging Face layout, or the adapter in PEFT's, with tokenizer and chat template.

Weights are gathered from all ranks one tensor at a time and written by rank 0. Rank 0 holds the whole model in host
memory for the time of the writing; the other ranks never hold more than one whole tensor.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain_trainer.dist import World

if TYPE_CHECKING:
    from peft import PeftModel


def export_full(folder: Path, world: World, module: nn.Module, hf_model: PreTrainedModel, *, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write safetensors, config, generation config, tokenizer and chat template; all ranks call it.

    Args:
        folder: Empty folder.
        world: All ranks; rank 0 writes.
        module: The sharded root that contains `hf_model`.
        hf_model: The transformers model.
        tokenizer: The tokenizer the model was trained with.
        dtype: Written precision: that of the computation, so what is loaded is what was validated.

    Raises:
        OSError: A file could not be written.
    """
    weights = gather(world, module, _prefix(module, hf_model), dtype=dtype, trained_only=False)
    if world.rank != 0:
        return
    hf_model.save_pretrained(folder, state_dict=weights)
    # save_pretrained notes the precision of the master weights; what was written is `dtype`.
    config = copy.deepcopy(hf_model.config)
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_adapter(folder: Path, world: World, module: nn.Module, hf_model: PeftModel, *, base: str, tokenizer: Any) -> None:
    """Write the adapter as plain peft reads it, with the tokenizer beside it; all ranks call it.

    Args:
        folder: Empty folder.
        world: All ranks; rank 0 writes.
        module: The sharded root that contains `hf_model`.
        hf_model: The peft model.
        base: Folder or hub id of the base model, written as `base_model_name_or_path`.
        tokenizer: The tokenizer the adapter was trained with.

    Raises:
        OSError: A file could not be written.
    """
    # Imported here: peft takes seconds, which a run without an adapter need not pay.
    from peft import get_peft_model_state_dict

    weights = gather(world, module, _prefix(module, hf_model), dtype=None, trained_only=True)
    if world.rank != 0:
        return
    # Asking peft to decide about embeddings would make it look for the base model on the network.
    adapter = get_peft_model_state_dict(hf_model, state_dict=weights, save_embedding_layers=False)
    save_file({name: tensor.contiguous() for name, tensor in adapter.items()}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(hf_model.peft_config["default"])
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_merged(folder: Path, adapter: Path, base: str, *, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write base and adapter as one plain model; rank 0 only. Needs host memory for the whole model in fp32.

    The base is read afresh and the adapter from its files, so this is what anybody who merges by peft would get.

    Args:
        folder: Where to write; made when missing.
        adapter: Folder of an exported adapter.
        base: Folder or hub id of the base model.
        tokenizer: Written beside the weights.
        dtype: Written precision; the merge itself is done in fp32.
    """
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    with warnings.catch_warnings():
        # peft reads an attribute by its old name.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    merged.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gather(world: World, module: nn.Module, prefix: str, *, dtype: torch.dtype | None, trained_only: bool) -> dict[str, Tensor]:
    """Whole tensors by name on rank 0's CPU, an empty dict on the others; all ranks call it, in the same order.

    Tied parameters stay tied: their names share one tensor. Names lose `prefix`; what lies outside it is left out.

    Args:
        world: All ranks.
        module: The sharded root; asking it (not a part) makes FSDP hand out shards, whatever ran last.
        prefix: Path of the wanted part inside `module`, with a dot at its end, or empty.
        dtype: Floating-point tensors are cast to it; None = left as they are.
        trained_only: Leave frozen parameters out.
    """
    whole: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if not name.startswith(prefix) or (trained_only and frozen):
            continue
        if id(tensor) not in seen:
            full = tensor.detach().full_tensor() if isinstance(tensor.detach(), DTensor) else tensor.detach()
            if world.rank == 0:
                cast = dtype if dtype is not None and full.is_floating_point() else full.dtype
                seen[id(tensor)] = full.to(device="cpu", dtype=cast)
            else:
                seen[id(tensor)] = full.new_empty(0)
        if world.rank == 0:
            whole[name.removeprefix(prefix)] = seen[id(tensor)]
    return whole


def _prefix(module: nn.Module, part: nn.Module) -> str:
    for name, candidate in module.named_modules():
        if candidate is part:
            return f"{name}." if name else ""
    raise AssertionError("the exported model is not part of the trained module")
