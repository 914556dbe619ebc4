"""The learning rate, by table."""

from __future__ import annotations

import math

import pytest

from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.optim.schedule import learning_rate


def _args(**changes):
    return FullTrainingArguments(model_path="m", data_path="d", ckpt_output_dir="o", **{"learning_rate": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "total", "expected"),
    [
        ({"lr_scheduler": "constant"}, 3, [1, 1, 1]),
        ({"lr_scheduler": "constant", "warmup_steps": 4}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"lr_scheduler": "linear"}, 4, [1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler": "linear", "warmup_steps": 2}, 6, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"lr_scheduler": "cosine"}, 4, [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ({"lr_scheduler": "cosine", "warmup_steps": 1}, 3, [1, 1, 0.5]),
        ({"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.2}, 2, [1, 0.6]),
        ({"lr_scheduler": "wsd"}, 20, [1] * 19 + [0.5]),
        ({"lr_scheduler": "wsd", "min_lr_ratio": 0.5, "warmup_steps": 2}, 22, [0.5, 1] + [1] * 19 + [0.75]),
        ({"lr_scheduler": "linear", "warmup_steps": 10}, 3, [0.1, 0.2, 0.3]),
        ({"lr_scheduler": "cosine", "warmup_steps": 3}, 3, [1 / 3, 2 / 3, 1]),
        ({"lr_scheduler": "cosine"}, 1, [1]),
    ],
)
def test_table(changes, total, expected):
    args = _args(**changes)
    assert [learning_rate(args, step, total) for step in range(1, total + 1)] == pytest.approx(expected)


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine", "cosine_with_min_lr", "wsd"])
def test_rises_then_never_rises_again_and_stays_positive(scheduler):
    args = _args(lr_scheduler=scheduler, warmup_steps=10)
    rates = [learning_rate(args, step, 100) for step in range(1, 101)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert min(rates) > 0


@pytest.mark.parametrize("step", [0, 4, -1])
def test_steps_outside_the_plan_are_an_error(step):
    with pytest.raises(ValueError, match=r"outside 1\.\.3"):
        learning_rate(_args(), step, 3)


def test_default_peaks():
    assert learning_rate(_args(learning_rate=None), 1, 10) == 2e-5
    assert learning_rate(_args(learning_rate=None, lora={}), 1, 10) == 2e-4
