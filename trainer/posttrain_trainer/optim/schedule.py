"""The learning rate as a pure function of the step: linear warm-up, then constant, linear, cosine or wsd."""

from __future__ import annotations

import math

from posttrain_trainer.contract.spec import FullTrainingArguments

_WSD_DECAY_SHARE = 0.1


def learning_rate(args: FullTrainingArguments, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step number `step`.

    In the warm-up it is `peak * step / warmup_steps`, so step `warmup_steps` is the first at the peak. After it, the
    decays start from the peak and would reach their floor one step after the last, so no step is wasted on zero.
    Cosine: Loshchilov and Hutter 2016, arXiv:1608.03983. wsd (warm-up, stable, decay): Hu et al. 2024, arXiv:2404.06395.

    Args:
        args: Names peak, scheduler, warm-up and floor.
        step: Number of the step, from 1 to `total_steps` (as in the metrics).
        total_steps: Steps planned for the whole run, over all attempts.

    Raises:
        ValueError: `step` is outside 1..total_steps.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step {step} is outside 1..{total_steps}")
    peak = args.resolved().learning_rate
    assert peak is not None
    if step <= args.warmup_steps:
        return peak * step / args.warmup_steps
    done = step - args.warmup_steps - 1
    share = done / (total_steps - args.warmup_steps)
    return peak * _factor(args.lr_scheduler, share, args.min_lr_ratio)


def _factor(scheduler: str, share: float, floor: float) -> float:
    """Share of the peak when `share` (0 to below 1) of the steps after the warm-up is done."""
    if scheduler == "constant":
        return 1.0
    if scheduler == "linear":
        return 1.0 - share
    if scheduler == "wsd":
        return 1.0 if share <= 1 - _WSD_DECAY_SHARE else floor + (1.0 - floor) * (1.0 - share) / _WSD_DECAY_SHARE
    cosine = 0.5 * (1.0 + math.cos(math.pi * share))
    return cosine if scheduler == "cosine" else floor + (1.0 - floor) * cosine
