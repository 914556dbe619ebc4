"""Sizes without weights agree with the real model; memory grows with what it should grow with."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from posttrain_trainer.contract.errors import InvalidArguments, ModelNotFound
from posttrain_trainer.models.estimate import estimate_memory, measure_model
from posttrain_trainer.models.load import load_model


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora": {"rank": 4}}, {"lora": {"rank": 4, "use_dora": True}}, {"lora": {"target_modules": ["q_proj"]}}],
)
def test_counts_equal_the_loaded_models(tiny, arguments, device, world, tmp_path, changes):
    weightless = tmp_path / "no-weights"
    weightless.mkdir()
    for name in ("config.json", "generation_config.json"):
        (weightless / name).write_bytes((tiny / name).read_bytes())
    size = measure_model(arguments(model_path=str(weightless), **changes))
    model = load_model(arguments(**changes), device, world)
    assert (size.parameters, size.trainable) == (model.num_parameters, model.num_trainable)
    assert (size.layers, size.hidden, size.intermediate, size.vocabulary) == (2, 64, 128, 512)
    assert size.outside_blocks == 512 * 64 + 64


def test_what_cannot_be_measured(arguments):
    with pytest.raises(ModelNotFound):
        measure_model(arguments(model_path="/nowhere"))
    with pytest.raises(InvalidArguments, match="name no layer"):
        measure_model(arguments(lora={"target_modules": ["x"]}))


def _memory(args, size, **changes):
    values = {"dtype": torch.float32, "device_kind": "cuda", "ranks": 1, "tokens": 2048, "accumulates": False, **changes}
    return estimate_memory(size, args, **values)


def test_parts_by_arithmetic(arguments):
    args = arguments()
    size = measure_model(args)
    memory = _memory(args, size)
    assert memory.weights == memory.gradients == 4 * 106_816
    assert memory.optimizer == 8 * 106_816
    assert memory.activations == 2048 * 2 * 4 * (12 * 64 + 4 * 128) + 512 * 256 * 12
    assert memory.per_rank == sum(vars(memory).values())
    assert _memory(args, size, device_kind="cpu").load == 4 * 106_816
    assert [_memory(arguments(async_save=value), size, device_kind="cpu").copies for value in ("auto", "on")] == [0, 12 * 106_816]


@pytest.mark.parametrize(
    ("changes", "less"),
    [
        ({"fsdp": {"sharding": "full"}}, {"weights", "optimizer", "gradients"}),
        ({"optimizer": "sgd"}, {"optimizer"}),
        ({"lora": {"rank": 4}}, {"optimizer", "gradients"}),
        ({"activation_checkpointing": True}, {"activations"}),
        ({"activation_offloading": True}, {"activations"}),
        ({"master_weights": False}, {"weights", "optimizer", "gradients"}),
        ({"fsdp": {"cpu_offload": True}}, {"weights", "optimizer"}),
    ],
)
def test_what_saves_what(arguments, changes, less):
    base, args = arguments(fsdp={"sharding": "none"}), arguments(**{"fsdp": {"sharding": "none"}, **changes})
    options = {"ranks": 4, "dtype": torch.bfloat16}
    before, after = _memory(base, measure_model(base), **options), _memory(args, measure_model(args), **options)
    saved = {name for name, value in dataclasses.asdict(after).items() if value < dataclasses.asdict(before)[name]}
    assert less <= saved
    assert after.per_rank < before.per_rank
