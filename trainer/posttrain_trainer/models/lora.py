"""Low-rank adapters by peft: LoRA, DoRA and rank-stabilised scaling. Only wiring: which layers, which seed, which names."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from posttrain_trainer.contract.errors import InvalidArguments
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
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft announces a change of a default that is not used here.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise InvalidArguments(f"lora.target_modules {targets!r} cannot carry an adapter: {error}") from error


def merged(model: PeftModel) -> PreTrainedModel:
    """The model with its adapters folded into its weights; `model` itself must not be used afterwards."""
    base: Any = model.merge_and_unload()
    return base


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Each target must match a layer: peft is silent when only some of them do."""
    names = [name for name, _ in model.named_modules()]
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        raise InvalidArguments(f"lora.target_modules {unknown} name no layer of this model; it has {', '.join(linear)}")
