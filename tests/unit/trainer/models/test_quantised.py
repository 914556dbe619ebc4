"""Training for quantisation, and adapters on a 4-bit base: what is computed, what is written, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from posttrain_trainer.checkpoint.export import export_full, gather
from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.methods import QatArguments
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models import quant
from posttrain_trainer.models.estimate import estimate_memory, measure_model
from posttrain_trainer.models.load import load_model
from posttrain_trainer.models.qat import base_config, quantised_layers
from posttrain_trainer.optim.groups import build_optimizer


def loss_of(model, batch):
    return (model.module(batch, cross_entropy).loss_sum / batch.num_supervised).item()


@pytest.mark.parametrize("name", ["8da4w", "int4", "int8"])
def test_linear_layers_compute_as_the_quantised_model_will(arguments, device, world, batch, tmp_path, name):
    from torchao.quantization import quantize_

    args = arguments(qat={"quantizer_name": name, "group_size": 32}, learning_rate=1e-2)
    model = load_model(args, device, world)
    assert model.notes == (f"14 linear layers train for {name} in groups of 32; checkpoints hold plain weights",)
    assert type(model.module.causal.get_output_embeddings()) is nn.Linear
    micro = batch(30)
    before = loss_of(model, micro)
    plain = loss_of(load_model(arguments(), device, world), micro)
    assert before != plain
    assert before == pytest.approx(plain, abs=0.5)
    optimizer = build_optimizer(args, model.module)
    for _ in range(3):
        optimizer.zero_grad()
        (model.module(micro, cross_entropy).loss_sum / micro.num_supervised).backward()
        optimizer.step()
    trained = loss_of(model, micro)
    assert trained < before - 0.1
    weights = gather(world, model.module, model.hf_model, dtype=torch.float32, trained_only=False)
    export_full(tmp_path, model.hf_model, weights, tokenizer=model.tokenizer, dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    layers = set(quantised_layers(loaded))
    quantize_(loaded, base_config(QatArguments(quantizer_name=name, group_size=32)), filter_fn=lambda _, path: path in layers)
    with torch.no_grad():
        logits = loaded(micro.input_ids_BS, use_cache=False).logits[0]
    learned = micro.labels_BS[0] != -100
    quantised = nn.functional.cross_entropy(logits[learned], micro.labels_BS[0][learned]).item()
    assert quantised == pytest.approx(trained, abs=2e-3)  # what was trained is what the quantised model computes


def test_a_group_that_divides_no_layer_is_refused_by_name(arguments, device, world):
    with pytest.raises(InvalidArguments, match=r"qat\.group_size 48 does not divide the input width of 14 layers, e\.g\. model\.layers\.0"):
        load_model(arguments(qat={"group_size": 48}), device, world)


def test_a_four_bit_base_trains_only_its_adapter(arguments, device, world, batch):
    pytest.importorskip("bitsandbytes")
    args = arguments(lora={"rank": 4, "quantize_base": True}, learning_rate=1e-2)
    model = load_model(args, device, world)
    plain = load_model(arguments(lora={"rank": 4}), device, world)
    assert model.notes == ("14 frozen weights are kept in 4 bits (NF4); adapters fit the model as it was, too",)
    assert (model.num_parameters, model.num_trainable) == (plain.num_parameters, plain.num_trainable)
    packed = quant.quantised_parameters(model.module)
    assert len(packed) == 14
    assert {parameter.dtype for parameter in packed} == {torch.uint8}
    kept = [parameter.clone() for parameter in packed]
    micro = batch(30)
    before = loss_of(model, micro)
    assert before != loss_of(plain, micro)
    assert before == pytest.approx(loss_of(plain, micro), abs=0.5)
    optimizer = build_optimizer(args, model.module)
    for _ in range(5):
        optimizer.zero_grad()
        (model.module(micro, cross_entropy).loss_sum / micro.num_supervised).backward()
        optimizer.step()
    assert loss_of(model, micro) < before - 0.05
    assert all(torch.equal(a, b) for a, b in zip(kept, packed, strict=True))


def test_a_four_bit_base_is_refused_by_name_where_it_cannot_be(arguments, device, world, monkeypatch):
    args = arguments(lora={"quantize_base": True})
    monkeypatch.setattr(quant, "find_spec", lambda _: None)
    with pytest.raises(InvalidArguments, match=r"lora\.quantize_base needs the package bitsandbytes"):
        load_model(args, device, world)
    monkeypatch.undo()
    monkeypatch.setattr(quant, "find_spec", lambda _: object())
    with pytest.raises(InvalidArguments, match="does not run on device mps"):
        quant.quantised_loading(args, dataclasses.replace(device, kind="mps"), torch.float32)


def test_a_four_bit_base_is_estimated_smaller(arguments):
    sizes = []
    for quantized in (False, True):
        args = arguments(lora={"quantize_base": quantized})
        size = measure_model(args)
        sizes.append(estimate_memory(size, args, dtype=torch.float32, device_kind="cuda", ranks=1, tokens=10, accumulates=False).weights)
    assert sizes[1] < sizes[0] - 50_000 * 3
