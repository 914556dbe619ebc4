"""From arguments to a model that is ready to train: load, adapt, recompute, shard, in the one right order."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from posttrain_trainer.contract.errors import InvalidArguments, ModelNotFound
from posttrain_trainer.contract.methods import QatArguments
from posttrain_trainer.contract.spec import FullTrainingArguments, LoraArguments
from posttrain_trainer.device import Device
from posttrain_trainer.dist import World
from posttrain_trainer.models import attention, memory
from posttrain_trainer.models.module import TrainModule, check_documents
from posttrain_trainer.models.quant import count_of, quantised_loading, quantised_parameters
from posttrain_trainer.models.shard import check_sharding, find_blocks, free_gathered, set_gradient_sync, shard
from posttrain_trainer.models.slices import EmptyModel, empty_model
from posttrain_trainer.models.source import ModelSource, find_model, loading
from posttrain_trainer.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["LoadedModel", "load_config", "load_model", "load_pretrained", "load_tokenizer", "sequence_limits"]

_DEFAULT_SEQ_LEN = 4096
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A sharded model, ready to train, and what others need to know of it."""

    module: TrainModule
    """`module(batch, loss)`: see `TrainModule.forward`; objectives call it."""
    hf_model: PreTrainedModel | PeftModel
    """The transformers model, or the peft model around it; its parameters are sharded."""
    config: PretrainedConfig
    """The model's configuration."""
    tokenizer: Any
    """With the chat template that was trained on."""
    kind: Literal["full", "adapter"]
    """What training changes."""
    max_positions: int | None
    """The model's own length limit in tokens; None = it states none."""
    dtype: torch.dtype
    """Precision of the computation."""
    num_parameters: int
    """All parameters, tied ones once, adapters included."""
    num_trainable: int
    """Those that training changes."""
    notes: tuple[str, ...] = field(default=())
    """What was done to the model besides, for the run's events."""
    warnings: tuple[str, ...] = field(default=())
    """What the person who asked should know."""

    def set_sync(self, last: bool) -> None:
        """Whether the next backward reduces gradients over the ranks: only the last micro-batch of a step does."""
        set_gradient_sync(self.module, last)

    def without_adapter(self) -> AbstractContextManager[None]:
        """The model as it was before training, inside the with-block; a full model is what it is."""
        if self.kind == "full":
            return nullcontext()
        from posttrain_trainer.models.lora import adapter_off

        return adapter_off(self.hf_model)

    def free_gathered(self) -> None:
        """Give back what forward passes without a backward left gathered."""
        free_gathered(self.module)


def load_model(args: FullTrainingArguments, device: Device, world: World, *, tokenizer: Any = None) -> LoadedModel:
    """Load, adapt, check, and shard over `world`; every rank calls it with the same arguments.

    Args:
        args: Names model, adapter, precision, sharding and activation checkpointing.
        device: This rank's device.
        world: The ranks.
        tokenizer: One from `load_tokenizer`; None = load it.

    Raises:
        ModelNotFound: No loadable model there.
        InvalidArguments: Something asked for cannot be done with this model or on this device.
    """
    check_sharding(args.fsdp, world)
    if args.activation_offloading:
        memory.check_offloading(device)
    dtype = device.resolve_dtype(args.dtype)
    source = find_model(args.model_path)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(args)
    causal, empty = _construct(source, args, device, dtype)
    attention.choose(causal, args.attention, device, dtype)
    trained = causal if args.lora is None else _adapted(causal, empty, args.lora, args.random_seed)
    autocast = dtype if args.master_weights and not device.can_shard and dtype != torch.float32 else None
    module = TrainModule(trained)
    if empty is None:
        check_documents(module)
    else:
        empty.note_names(module)
    module.autocast = autocast
    notes = [] if args.qat is None else [_quantisation_aware(causal, args.qat)]  # after the check: rounding makes it coarse
    if args.lora is not None and args.lora.quantize_base:
        notes.append(f"{len(quantised_parameters(module))} frozen weights are kept in 4 bits (NF4); adapters fit the model as it was, too")
    blocks = find_blocks(causal, list(causal._no_split_modules or []))
    if args.activation_checkpointing:
        memory.checkpoint_activations(blocks)
    if args.activation_offloading:
        memory.offload_activations(blocks)
    total, trainable = _count(module)
    shard(module, blocks, args.fsdp, world, dtype)
    if empty is not None:
        empty.fill(module, torch.device("cpu") if args.fsdp.cpu_offload else device.torch_device)
        check_documents(module)
        free_gathered(module)
    module.train()
    return LoadedModel(
        module=module,
        hf_model=trained,
        config=causal.config,
        tokenizer=tokenizer,
        kind="full" if args.lora is None else "adapter",
        max_positions=max_positions(causal.config),
        dtype=dtype,
        num_parameters=total,
        num_trainable=trainable,
        notes=tuple(notes),
        warnings=tuple(_warnings(args, device, dtype, causal, tokenizer)),
    )


def load_config(source: ModelSource) -> PretrainedConfig:
    """A model's configuration, without weights."""
    with loading(source):
        return AutoConfig.from_pretrained(source.name, **source.options())


def _plain_config(source: ModelSource) -> PretrainedConfig:
    config = load_config(source)
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidArguments(f"model {source.name} is quantised and cannot be trained; name its unquantised original")
    return config


def load_pretrained(source: ModelSource, dtype: torch.dtype, **options: Any) -> Any:
    """The causal language model with its weights in `dtype` on the CPU, attention by document, tied weights tied.

    Args:
        source: Where it is.
        dtype: Of the weights.
        options: Further keywords for `from_pretrained`, as `quantised_loading` gives them.

    Raises:
        ModelNotFound: Not there, damaged, without safetensors, or some weights are missing from its files.
        InvalidArguments: Quantised, or of an unknown kind.
    """
    attention.register()
    _plain_config(source)
    loader: Any = AutoModelForCausalLM
    with loading(source):
        model, info = loader.from_pretrained(
            source.name,
            dtype=dtype,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            output_loading_info=True,
            **source.options(),
            **options,
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelNotFound(f"the files of {source.name} lack {len(missing)} weights, e.g. {missing[0]}; fetch the model again")
    if unexpected := sorted(info["unexpected_keys"]):
        _log.warning("weights of %s that the model has no use for are left out: %s", source.name, ", ".join(unexpected[:10]))
    return model


def max_positions(config: PretrainedConfig) -> int | None:
    """The model's own length limit in tokens; None when its configuration states none."""
    value = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(value) if value else None


def sequence_limits(args: FullTrainingArguments, positions: int | None) -> tuple[int, int]:
    """Longest sample and most tokens of a micro-batch: (max_seq_len, max_batch_len), defaults filled in.

    Raises:
        InvalidArguments: max_seq_len is beyond the model's limit.
    """
    longest, documents = args.max_seq_len, args.documents_per_sample
    if longest is None:
        longest = min(_DEFAULT_SEQ_LEN, positions or _DEFAULT_SEQ_LEN)
        if args.max_batch_len is not None:
            longest = min(longest, args.max_batch_len // documents)
    elif positions is not None and longest > positions:
        raise InvalidArguments(f"max_seq_len {longest} is beyond the model's limit of {positions} tokens; lower it to {positions}")
    return longest, args.max_batch_len or max(longest * documents, _DEFAULT_SEQ_LEN)


def _construct(source: ModelSource, args: FullTrainingArguments, device: Device, dtype: torch.dtype) -> tuple[Any, EmptyModel | None]:
    """The model: without weights where each rank can read its own shard, else with all of them and None."""
    weights = torch.float32 if args.master_weights else dtype
    quantised = quantised_loading(args, device, dtype)
    if not quantised and device.can_shard:
        empty = empty_model(source, _plain_config(source), weights)
        if empty is not None:
            return empty.causal, empty
    return load_pretrained(source, weights, **quantised), None


def _adapted(model: Any, empty: EmptyModel | None, args: LoraArguments, seed: int) -> PeftModel:
    # Imported here: peft takes seconds, which a run without an adapter need not pay.
    from posttrain_trainer.models.lora import add_lora, set_magnitudes

    if empty is None:
        return add_lora(model, args, seed=seed)
    with empty.with_stand_ins():
        adapted = add_lora(model, args, seed=seed)
    if args.use_dora:
        set_magnitudes(adapted, empty.with_weight)
    return adapted


def _quantisation_aware(model: nn.Module, args: QatArguments) -> str:
    # Imported here: torchao takes seconds, which other runs need not pay.
    from posttrain_trainer.models.qat import prepare_qat

    return prepare_qat(model, args)


def _count(module: nn.Module) -> tuple[int, int]:
    """All and trainable parameters; `parameters()` gives tied ones once."""
    sizes = [(count_of(p), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trainable in sizes if trainable)


def _warnings(args: FullTrainingArguments, device: Device, dtype: torch.dtype, model: Any, tokenizer: Any) -> list[str]:
    found = []
    if dtype == torch.bfloat16 and not device.bf16_fast:
        found.append(f"dtype bf16 is emulated on this {device.kind} and slower than fp32; dtype auto would choose fp32")
    if dtype == torch.bfloat16 and not args.master_weights:
        found.append("master_weights is off: in pure bf16 small updates vanish, and little is learned at low learning rates")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        found.append(f"the tokenizer knows {len(tokenizer)} tokens, the model has {rows}; rows that use the others fail")
    return found
