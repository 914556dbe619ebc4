"""Each rank reads its own rows: the same numbers as from the whole model, at the memory of a shard."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain_trainer.contract.errors import ModelNotFound
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models import load
from posttrain_trainer.models.slices import WeightFiles
from posttrain_trainer.models.source import find_model
from posttrain_trainer.optim.groups import build_optimizer
from posttrain_trainer.testing import run_ranks, tiny_model, whole

SCRIPT = Path(__file__).with_name("slices_ranks.py")


def _whole(monkeypatch):
    monkeypatch.setattr(load, "empty_model", lambda *_: None)


def _trained(args, device, world, batch):
    model = load.load_model(args, device, world)
    optimizer = build_optimizer(args, model.module)
    losses = []
    for _ in range(2):
        result = model.module(batch(20, 30), cross_entropy)
        result.loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss_sum.item())
    weights = {name: whole(p).detach() for name, p in model.module.state_dict().items()}
    return losses, weights, model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bf16", "master_weights": False},
        {"lora": {"rank": 4, "dropout": 0.1}},
        {"lora": {"rank": 4, "use_dora": True, "use_rslora": True}},
        {"lora": {"rank": 2, "target_modules": ["q_proj", "down_proj"]}, "dtype": "bf16", "master_weights": False},
        {"qat": {"group_size": 32}},
    ],
    ids=["full", "pure bf16", "lora", "dora", "some layers", "qat"],
)
@pytest.mark.filterwarnings("ignore")
def test_not_a_bit_differs_from_the_whole_model(arguments, device, world, batch, monkeypatch, changes):
    args = arguments(learning_rate=1e-2, **changes)
    torch.manual_seed(3)
    losses, weights, model = _trained(args, device, world, batch)
    _whole(monkeypatch)
    torch.manual_seed(3)
    same_losses, same_weights, same = _trained(args, device, world, batch)
    assert losses == same_losses
    assert list(weights) == list(same_weights)
    assert all(torch.equal(weights[name], same_weights[name]) and weights[name].dtype == same_weights[name].dtype for name in weights)
    assert (model.num_parameters, model.num_trainable, model.kind) == (same.num_parameters, same.num_trainable, same.kind)
    causal, other = model.module.causal, same.module.causal
    assert causal.generation_config.to_dict() == other.generation_config.to_dict()
    assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight
    buffers, others = dict(causal.named_buffers()), dict(other.named_buffers())
    assert list(buffers) == list(others) != []
    assert all(torch.equal(buffers[name], others[name]) for name in buffers)


def test_several_files_untied_weights_and_a_tensor_too_many(arguments, device, world, tmp_path, caplog):
    folder = tiny_model(tmp_path / "m", tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    first = folder / sorted(set(index["weight_map"].values()))[0]
    save_file({**load_file(first), "spare.weight": torch.zeros(2)}, first, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        loaded = load.load_model(arguments(model_path=str(folder)), device, world)
    assert "spare.weight" in caplog.text
    expected = model.state_dict()
    found = {name.removeprefix("model."): whole(p) for name, p in loaded.module.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_files_with_other_names_are_loaded_whole(arguments, device, world, tmp_path):
    folder = tiny_model(tmp_path / "m")
    path = folder / "model.safetensors"
    plain = load_file(path)
    save_file({name.removeprefix("model."): tensor for name, tensor in plain.items()}, path, metadata={"format": "pt"})  # as AutoModel writes them
    loaded = load.load_model(arguments(model_path=str(folder)), device, world)
    found = dict(loaded.module.named_parameters())
    assert torch.equal(whole(found["model.model.norm.weight"]), plain["model.norm.weight"])


def test_a_file_cut_short_is_named(arguments, device, world, tmp_path):
    folder = tiny_model(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelNotFound, match="damaged or cut short"):
        load.load_model(arguments(model_path=str(folder)), device, world)


def test_only_the_rows_asked_for_are_read(tiny):
    files = WeightFiles.of(find_model(str(tiny)))
    whole = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    rows = files.rows("model.embed_tokens.weight", 5, 9, torch.bfloat16)
    assert torch.equal(rows, whole[5:9].bfloat16())
    assert rows.untyped_storage().nbytes() == 4 * 64 * 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads peaks from /proc")
def test_two_ranks_need_the_memory_of_a_shard_each_and_compute_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")  # what is free is given back: glibc else keeps it for later
    big = tiny_model(tmp_path / "big", vocab_size=1024, hidden=512, layers=20, heads=8)
    uneven = tiny_model(tmp_path / "uneven", vocab_size=513, hidden=66, heads=3)
    size = (big / "model.safetensors").stat().st_size
    assert size > 180e6
    ranks = [json.loads(out) for out in run_ranks(SCRIPT, 2, str(big), str(uneven), timeout_s=240)]
    for rank in ranks:
        losses, peaks = rank["losses"], rank["peaks"]
        for name in ("full", "dora", "none"):
            assert losses[f"{name} slices"] == losses[f"{name} whole"]
        # The shard, 34 MB that are mapped at a time, and some 40 MB for what the check gathers: embedding and two blocks.
        assert peaks["slices"] < 0.5 * size + 100e6, peaks
        assert peaks["whole"] > 1.3 * size, peaks
