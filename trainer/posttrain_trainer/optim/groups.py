"""The optimizer and its parameter groups: matrices decay; biases, norms and embeddings do not."""

from __future__ import annotations

import torch
from torch import nn

from posttrain_trainer.contract.spec import FullTrainingArguments


def build_optimizer(args: FullTrainingArguments, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `args` names over the trainable parameters of `module` (sharded or not).

    AdamW: Loshchilov and Hutter 2017, arXiv:1711.05101. Each parameter tensor appears once, tied ones too. The
    learning rate stands at its peak; the loop sets it before each step.
    """
    groups = parameter_groups(module, args.weight_decay)
    peak = args.resolved().learning_rate
    assert peak is not None
    # Fused: one pass over memory. torch picks the slow per-tensor loop on CPU unless told.
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=peak, fused=True)
    cls = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
    return cls(groups, lr=peak, betas=args.adamw_betas, eps=args.adamw_eps, fused=True)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups, `decay` and `no_decay` (an empty one is left out), in the order of the module's parameters."""
    embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (no_decay if parameter.ndim < 2 or id(parameter) in embeddings else decay).append(parameter)
    groups: list[dict[str, object]] = [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
