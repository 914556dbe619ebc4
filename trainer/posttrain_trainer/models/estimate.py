"""How large a run will be, without loading a weight: the model is built by accelerate on no device at all.

An estimate for planning, on the high side: it knows what is kept at the peak of a step, not what allocators waste.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig

from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.models.load import load_config
from posttrain_trainer.models.shard import find_blocks
from posttrain_trainer.models.source import find_model, loading

_RUNTIME_BYTES = {"cpu": 600 * 2**20}
_RUNTIME_ELSEWHERE = 1024 * 2**20
_CHUNK_LOGITS_BYTES = 256 * 4 * 3  # per vocabulary entry: chunk of logits, its gradient, and one copy, in fp32
_NF4_BYTES = 0.52  # a weight's four bits, and its share of the doubly quantised scales


@dataclass(frozen=True)
class ModelSize:
    """Counts of parameters, tied ones once."""

    parameters: int
    trainable: int
    largest_block: int
    outside_blocks: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a step, by what they hold."""

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    runtime: int
    copies: int
    """Host memory that `async_save: on` needs, where the host's is the device's; auto takes it only where it is free."""
    load: int
    """Peak while loading: the shard, or all weights where the base is quantised on load."""

    @property
    def per_rank(self) -> int:
        """The larger of loading and training."""
        parts = asdict(self)
        load = parts.pop("load")
        return int(max(sum(parts.values()), load + self.runtime))


def measure_model(args: FullTrainingArguments) -> ModelSize:
    """Sizes of the model that `args` name, with its adapter; reads the configuration, no weights.

    Raises:
        ModelNotFound: No model there.
        InvalidArguments: Its kind cannot be trained, or an adapter target names no layer.
    """
    source = find_model(args.model_path)
    config = load_config(source)
    with loading(source), init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    blocks = [sum(p.numel() for p in block.parameters()) for block in find_blocks(model, list(model._no_split_modules or []))]
    total = trainable = sum(p.numel() for p in model.parameters())
    outside = total - sum(blocks)
    if args.lora is not None:
        # Imported here: peft takes seconds.
        from posttrain_trainer.models.lora import add_lora

        with init_empty_weights():
            adapted = add_lora(model, args.lora, seed=args.random_seed)
        trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        total = sum(p.numel() for p in adapted.parameters())
    text: PretrainedConfig = config.get_text_config()
    return ModelSize(
        parameters=total,
        trainable=trainable,
        largest_block=max(blocks),
        outside_blocks=outside,
        layers=len(blocks),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
    )


def estimate_memory(
    size: ModelSize, args: FullTrainingArguments, *, dtype: torch.dtype, device_kind: str, ranks: int, tokens: int, accumulates: bool
) -> MemoryEstimate:
    """Peak bytes of one rank.

    Args:
        size: From `measure_model`.
        args: Precision, sharding, optimizer and checkpointing.
        dtype: Precision of the computation.
        device_kind: Where it runs.
        ranks: Ranks that share the model.
        tokens: Tokens of the largest micro-batch of one rank.
        accumulates: Whether a step has several micro-batches, whose gradients add up unsharded in fp32.
    """
    compute = dtype.itemsize
    master = 4 if args.master_weights else compute
    shards = {"none": 1, "hybrid": args.fsdp.shard_ranks or ranks}.get(args.fsdp.sharding, ranks)
    if args.fsdp.sharding in ("full", "hybrid"):
        gathered = compute * (2 * size.largest_block + size.outside_blocks)
    else:
        gathered = compute * size.parameters
    per_token = compute * (12 * size.hidden + 4 * size.intermediate)
    layers = 1 if args.activation_checkpointing or args.activation_offloading else size.layers
    kept_inputs = size.layers * size.hidden * compute if args.activation_checkpointing and not args.activation_offloading else 0
    offload = 0 if args.fsdp.cpu_offload else 1
    weights = offload * size.parameters * master // shards
    if args.lora is not None and args.lora.quantize_base:
        packed = size.parameters - size.outside_blocks - size.trainable
        weights = (size.parameters - packed) * master // shards + int(packed * _NF4_BYTES)  # every rank holds all of the packed ones
        gathered = compute * size.outside_blocks
    return MemoryEstimate(
        weights=weights,
        gathered=gathered,
        gradients=size.trainable * 4 if accumulates else size.trainable * master // shards,
        optimizer=offload * (0 if args.optimizer == "sgd" else 2 * size.trainable * master // shards),
        activations=tokens * (layers * per_token + kept_inputs) + size.vocabulary * _CHUNK_LOGITS_BYTES,
        runtime=_RUNTIME_BYTES.get(device_kind, _RUNTIME_ELSEWHERE),
        copies=3 * size.trainable * master // shards if args.async_save == "on" and device_kind == "cpu" else 0,
        load=_load_bytes(size, args, device_kind, master, shards),
    )


def _load_bytes(size: ModelSize, args: FullTrainingArguments, device_kind: str, master: int, shards: int) -> int:
    if device_kind != "cpu":
        return 0
    quantised = args.lora is not None and args.lora.quantize_base
    return size.parameters * master // (1 if quantised else shards)
