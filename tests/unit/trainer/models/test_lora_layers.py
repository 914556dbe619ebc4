"""Which layers get adapters, what trains, and that merged = adapter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.spec import LoraArguments
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models.load import load_model, load_pretrained
from posttrain_trainer.models.lora import add_lora
from posttrain_trainer.models.source import find_model
from posttrain_trainer.optim.groups import build_optimizer
from posttrain_trainer.testing import tiny_model, whole

ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def _base(tiny):
    return load_pretrained(find_model(str(tiny)), torch.float32)


def _adapted_layers(model):
    return {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, ALL),
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        (("self_attn.o_proj",), {"o_proj"}),
        (("model.layers.0.mlp.down_proj",), {"down_proj"}),
    ],
)
def test_targets(tiny, targets, expected):
    model = add_lora(_base(tiny), LoraArguments(target_modules=targets), seed=1)
    assert _adapted_layers(model) == expected
    assert all(".lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    blocks = 1 if targets == ("model.layers.0.mlp.down_proj",) else 2
    assert sum(".lora_A" in name for name, _ in model.named_parameters()) == blocks * len(expected)


@pytest.mark.parametrize("targets", [("query",), ("q_proj", "q_prj")])
def test_a_target_that_names_nothing_is_refused(tiny, targets):
    with pytest.raises(InvalidArguments, match=f"{targets[-1]!r}.*name no layer.*q_proj"):
        add_lora(_base(tiny), LoraArguments(target_modules=targets), seed=1)


def test_a_target_that_cannot_be_adapted_is_refused(tiny):
    with pytest.raises(InvalidArguments, match="cannot carry an adapter"):
        add_lora(_base(tiny), LoraArguments(target_modules=("mlp",)), seed=1)


def test_the_seed_decides_and_leaves_the_generator_alone(tiny):
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    one, two, three = (add_lora(_base(tiny), LoraArguments(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], three[name]) for name in one)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 4.0), (True, 4.0 * 2)])
def test_rank_and_scale(tiny, rslora, scale):
    model = add_lora(_base(tiny), LoraArguments(rank=4, alpha=16, dropout=0.25, use_rslora=rslora), seed=1)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == scale
    assert layer.lora_A["default"].weight.shape == (4, 64)
    assert layer.lora_dropout["default"].p == 0.25


@pytest.mark.parametrize("dora", [False, True])
def test_training_changes_the_adapter_alone_and_merging_gives_the_same_model(arguments, device, world, batch, dora):
    args = arguments(lora=LoraArguments(rank=4, use_dora=dora), learning_rate=1e-2)
    model = load_model(args, device, world)
    before = {name: whole(p).detach().clone() for name, p in model.module.named_parameters()}
    optimizer = build_optimizer(args, model.module)
    for _ in range(3):
        optimizer.zero_grad()
        model.module(batch(20, 30), cross_entropy).loss_sum.backward()
        optimizer.step()
    after = {name: whole(p).detach() for name, p in model.module.named_parameters()}
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if ".lora_" in name}

    fresh = add_lora(_base(args.model_path), args.lora, seed=0)
    fresh.load_state_dict({name.removeprefix("model."): value for name, value in after.items()}, strict=False)
    plain = _base(args.model_path)
    ids = batch(24).input_ids_BS
    with torch.no_grad():
        adapter, base = (m.eval()(input_ids=ids, use_cache=False, document_lengths=None).logits for m in (fresh, plain))
        merged = copy.deepcopy(fresh).merge_and_unload()(input_ids=ids, use_cache=False, document_lengths=None).logits
    assert (merged - adapter).abs().max() < 1e-3
    assert (base - adapter).abs().max() > 1e-2


def test_a_tied_head_cannot_be_adapted(tiny):
    with pytest.raises(InvalidArguments, match=r"lm_head.*tied to the embedding"):
        add_lora(_base(tiny), LoraArguments(target_modules=("q_proj", "lm_head")), seed=1)


def test_an_adapted_head_takes_the_general_loss(arguments, device, world, batch, tmp_path):
    untied = tiny_model(tmp_path, tied=False)
    args = arguments(model_path=str(untied), lora=LoraArguments(target_modules=("q_proj", "lm_head")), learning_rate=1e-2)
    model = load_model(args, device, world)
    assert type(model.module.causal.get_output_embeddings()) is not nn.Linear
    result = model.module(batch(20, 30), cross_entropy)
    result.loss_sum.backward()
    grads = {name for name, p in model.module.named_parameters() if p.grad is not None}
    assert any("lm_head.lora_B" in name for name in grads)
    assert result.loss_sum.item() > 0
