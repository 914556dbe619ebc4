"""Low-rank adapters by peft: LoRA, DoRA and rank-stabilised scaling. Only wiring: which layers, which seed, which names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from posttrain_trainer.contract.errors import InvalidArguments, ModelNotFound
from posttrain_trainer.contract.spec import LoraArguments


def add_lora(model: PreTrainedModel, args: LoraArguments, *, seed: int) -> PeftModel:
    """Freeze `model` and put adapters beside its linear layers, in place; adapter weights are new, from `seed`.

    Every rank calls this with the same seed before sharding, so all hold the same adapters.

    Raises:
        InvalidArguments: A target names no layer, or layers that cannot carry an adapter.
    """
    targets: str | list[str] = "all-linear"
    if args.target_modules is not None:
        _check_targets(model, args.target_modules)
        targets = list(args.target_modules)
    alpha: Any = args.alpha  # annotated int in peft, used as a factor
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=args.rank,
        lora_alpha=alpha,
        lora_dropout=args.dropout,
        target_modules=targets,
        use_dora=args.use_dora,
        use_rslora=args.use_rslora,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]), _old_names():
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise InvalidArguments(f"lora.target_modules {targets!r} cannot carry an adapter: {error}") from error


def set_magnitudes(model: Any, with_weight: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Give DoRA's magnitudes their start, the norms of the weights, where these were not there when adapters were added.

    Args:
        model: From `add_lora`.
        with_weight: Makes a context in which a base layer has its weight; one layer at a time.
    """
    for layer in model.modules():
        for name, magnitude in getattr(layer, "lora_magnitude_vector", {}).items():
            base = layer.get_base_layer()
            with with_weight(base), torch.no_grad():
                magnitude.update_layer(
                    base_layer=base, lora_A=layer.lora_A[name].weight, lora_B=layer.lora_B[name].weight, scaling=layer.scaling[name]
                )


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """The model as it is without its adapter, inside the with-block.

    Peft's own switch also makes the adapter untrainable and trainable again, which sharded parameters don't bear.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def load_adapter(model: Any, folder: Path) -> PeftModel:
    """Put a saved adapter onto its model, in place, for inference.

    Raises:
        ModelNotFound: No adapter there (one of pickled weights is not read).
    """
    if not all((folder / name).is_file() for name in ("adapter_config.json", "adapter_model.safetensors")):
        raise ModelNotFound(f"{folder} holds no adapter (adapter_config.json and adapter_model.safetensors)")
    with _old_names():
        return PeftModel.from_pretrained(model, str(folder.resolve()), local_files_only=True)


@contextmanager
def _old_names() -> Iterator[None]:
    """Hide that peft reads an attribute of transformers models by its old name: no concern of whoever trains."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        yield


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Each target must match a layer: peft is silent when only some of them do."""
    names = [name for name, _ in model.named_modules()]
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise InvalidArguments(f"lora.target_modules {unknown} name no layer of this model; it has {', '.join(linear)}")
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        return
    shared = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    tied = [n for n, m in model.named_modules() if id(m) in shared and any(n == t or n.endswith(f".{t}") for t in targets)]
    if tied:
        raise InvalidArguments(f"lora.target_modules names {tied}, whose weight is tied to the embedding and cannot be adapted alone; leave it out")
