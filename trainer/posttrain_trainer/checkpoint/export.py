"""What people load: the model in Hugging Face layout, or the adapter in PEFT's, with tokenizer and chat template.

Rank 0 writes, and holds the whole model in host memory for that time. It has the weights from all ranks, one tensor at a
time, so that the others never hold more than one whole tensor; or, beside training, from copies and from the state that
the ranks have just written.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain_trainer.checkpoint.state import read_whole, trained_tensors
from posttrain_trainer.dist import World

if TYPE_CHECKING:
    from peft import PeftModel


def export_full(folder: Path, hf_model: PreTrainedModel, weights: dict[str, Tensor], *, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write safetensors, config, generation config, tokenizer and chat template; rank 0 only.

    Args:
        folder: Empty folder.
        hf_model: The transformers model.
        weights: Whole tensors by name, in `dtype`.
        tokenizer: The tokenizer the model was trained with.
        dtype: Written precision: that of the computation, so what is loaded is what was validated.

    Raises:
        OSError: A file could not be written.
    """
    hf_model.save_pretrained(folder, state_dict=weights)
    # save_pretrained notes the precision of the master weights; what was written is `dtype`.
    config = copy.deepcopy(hf_model.config)
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_adapter(folder: Path, hf_model: PeftModel, weights: dict[str, Tensor], *, base: str, tokenizer: Any) -> None:
    """Write the adapter as plain peft reads it, with the tokenizer beside it; rank 0 only.

    Args:
        folder: Empty folder.
        hf_model: The peft model.
        weights: Whole tensors of the adapter by name.
        base: Folder or hub id of the base model, written as `base_model_name_or_path`.
        tokenizer: The tokenizer the adapter was trained with.

    Raises:
        OSError: A file could not be written.
    """
    # Imported here: peft takes seconds, which a run without an adapter need not pay.
    from peft import get_peft_model_state_dict

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


def gather(world: World, module: nn.Module, part: nn.Module, *, dtype: torch.dtype | None, trained_only: bool) -> dict[str, Tensor]:
    """Whole tensors by name on rank 0's CPU, an empty dict on the others; all ranks call it, in the same order.

    Tied parameters stay tied: their names share one tensor.

    Args:
        world: All ranks.
        module: The sharded root; asking it (not a part) makes FSDP hand out shards, whatever ran last.
        part: The wanted part inside `module`; names are those it has itself.
        dtype: Floating-point tensors are cast to it; None = left as they are.
        trained_only: Leave frozen parameters out.
    """
    whole: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in _tensors(module, part, trained_only=trained_only).items():
        if id(tensor) not in seen:
            mine = tensor.detach()
            full = mine.full_tensor() if isinstance(mine, DTensor) else mine
            seen[id(tensor)] = _cast(full, dtype) if world.rank == 0 else full.new_empty(0)
        if world.rank == 0:
            whole[name] = seen[id(tensor)]
    return whole


class FromState:
    """The same tensors as `gather`, from what a checkpoint's state holds, so that no other rank has to do with it.

    Made by all ranks between steps. Frozen tensors, which a state does not have, are gathered then: a full model has few.

    Args:
        world: All ranks.
        module: The sharded root.
        part: The wanted part inside `module`.
        dtype: Floating-point tensors are cast to it; None = left as they are.
        trained_only: Leave frozen parameters out.
    """

    def __init__(self, world: World, module: nn.Module, part: nn.Module, *, dtype: torch.dtype | None, trained_only: bool) -> None:
        keys = {id(tensor): key for key, tensor in trained_tensors(module).items()}
        wanted = _tensors(module, part, trained_only=trained_only)
        self._dtype = dtype
        self._key_of = {name: f"model.{keys[id(tensor)]}" for name, tensor in wanted.items() if id(tensor) in keys}
        self._frozen: dict[str, Tensor] = {}
        if len(self._key_of) < len(wanted):
            found = gather(world, module, part, dtype=dtype, trained_only=trained_only)
            self._frozen = {name: tensor for name, tensor in found.items() if name not in self._key_of}

    def read(self, copies: dict[str, Tensor], folder: Path, group: ProcessGroup) -> dict[str, Tensor]:
        """Whole tensors by name; rank 0 only, once all ranks have written.

        Args:
            copies: This rank's share, as it was written.
            folder: The state's folder, where the other ranks' shares are read from.
            group: One of rank 0 alone.
        """
        keys = set(self._key_of.values())
        whole = {key: local for key in keys if (local := _whole_here(copies[key])) is not None}
        if rest := sorted(keys - whole.keys()):
            whole |= read_whole(folder, rest, group)
        cast = {key: _cast(tensor, self._dtype) for key, tensor in whole.items()}
        return self._frozen | {name: cast[key] for name, key in self._key_of.items()}


def _whole_here(tensor: Tensor) -> Tensor | None:
    """The tensor, if this rank has all of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.to_local().shape == tensor.shape else None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device="cpu", dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def _tensors(module: nn.Module, part: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """Parameters and saved buffers of `part` by the names it has itself."""
    prefix = _prefix(module, part)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if name.startswith(prefix) and not (trained_only and isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
    }


def _prefix(module: nn.Module, part: nn.Module) -> str:
    for name, candidate in module.named_modules():
        if candidate is part:
            return f"{name}." if name else ""
    raise AssertionError("the exported model is not part of the trained module")
