"""What loads, what is refused and with which words, and what precision, sharding and checkpointing change."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain_trainer.contract.errors import InvalidArguments, ModelNotFound
from posttrain_trainer.contract.spec import FsdpArguments, LoraArguments
from posttrain_trainer.device import Device
from posttrain_trainer.dist import RankFacts, World
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models.load import load_model, load_tokenizer, sequence_limits
from posttrain_trainer.models.module import TrainModule
from posttrain_trainer.models.shard import check_sharding, find_blocks
from posttrain_trainer.models.templates import CHATML
from posttrain_trainer.optim.groups import build_optimizer
from posttrain_trainer.testing import tiny_model, whole


def test_facts_of_a_loaded_model(arguments, device, world):
    model = load_model(arguments(), device, world)
    assert (model.kind, model.dtype, model.max_positions) == ("full", torch.float32, 2048)
    assert model.num_parameters == model.num_trainable == 106_816
    assert model.warnings == ()
    causal = model.module.causal
    assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight
    assert model.module.training


def test_tied_embeddings_stay_tied_over_a_step(arguments, device, world, batch):
    args = arguments(learning_rate=1e-2)
    model = load_model(args, device, world)
    optimizer = build_optimizer(args, model.module)
    model.module(batch(20, 30), cross_entropy).loss_sum.backward()
    optimizer.step()
    causal = model.module.causal
    head, embedding = causal.get_output_embeddings().weight, causal.get_input_embeddings().weight
    assert head is embedding
    with torch.no_grad():
        hidden = torch.randn(1, 64)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == 106_816
    assert whole(head).shape == (512, hidden.shape[1])


def _losses(args, device, world, batch, steps=3):
    model = load_model(args, device, world)
    optimizer = build_optimizer(args, model.module)
    losses = []
    for _ in range(steps):
        for last, micro in ((False, batch(12, 20)), (True, batch(25))):
            model.set_sync(last)
            result = model.module(micro, cross_entropy)
            (result.loss_sum / 28).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss_sum.item())
    return losses, model


@pytest.mark.parametrize(
    "changes",
    [
        {"fsdp": FsdpArguments(sharding="grad_op")},
        {"fsdp": FsdpArguments(sharding="none")},
        {"activation_checkpointing": True},
    ],
)
def test_sharding_and_checkpointing_change_no_bit(arguments, device, world, batch, changes):
    plain, _ = _losses(arguments(learning_rate=1e-2), device, world, batch)
    other, model = _losses(arguments(learning_rate=1e-2, **changes), device, world, batch)
    assert other == plain
    assert plain[-1] < plain[0]
    assert not [name for name in model.module.state_dict() if "wrapped" in name]


def test_checkpointing_recomputes_each_block(arguments, device, world, batch):
    counts = {}

    def count(args):
        model = load_model(args, device, world)
        calls = []
        for block in model.module.causal.model.layers:
            block.self_attn.register_forward_hook(lambda *_: calls.append(1))
        model.module(batch(12), cross_entropy).loss_sum.backward()
        return len(calls)

    counts["off"], counts["on"] = count(arguments()), count(arguments(activation_checkpointing=True))
    assert counts == {"off": 2, "on": 4}


def test_bf16_computes_over_fp32_masters(arguments, device, world, batch):
    fp32, _ = _losses(arguments(learning_rate=1e-2), device, world, batch)
    bf16, model = _losses(arguments(learning_rate=1e-2, dtype="bf16"), device, world, batch)
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=1e-2)
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    if not device.bf16_fast:
        assert any("bf16 is emulated" in warning for warning in model.warnings)


def test_without_masters_everything_is_in_the_computing_precision(arguments, device, world, batch):
    losses, model = _losses(arguments(learning_rate=1e-2, dtype="bf16", master_weights=False), device, world, batch)
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    assert losses[-1] < losses[0]
    assert any("master_weights is off" in warning for warning in model.warnings)


@dataclasses.dataclass(frozen=True)
class _Unsharded(Device):
    """The CPU in the part of a device without FSDP2 (MPS)."""

    @property
    def can_shard(self) -> bool:
        return False


def test_a_device_without_fsdp_trains_on_master_weights_too(arguments, device, batch):
    plain = _Unsharded(**vars(device))
    with World.open(plain, facts=RankFacts()) as world:
        fp32, model = _losses(arguments(learning_rate=1e-2), plain, world, batch)
        bf16, masters = _losses(arguments(learning_rate=1e-2, dtype="bf16"), plain, world, batch)
        assert type(model.module) is TrainModule
        assert {p.dtype for p in masters.module.parameters()} == {torch.float32}
    with World.open(device, facts=RankFacts()) as world:
        sharded, _ = _losses(arguments(learning_rate=1e-2), device, world, batch)
    assert fp32 == pytest.approx(sharded, rel=1e-6)
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "world_size", "fsdp", "sentence"),
    [
        ("cpu", 1, FsdpArguments(cpu_offload=True), "fsdp.cpu_offload has no meaning on device cpu"),
        ("mps", 2, FsdpArguments(), "trains on one rank only"),
        ("mps", 1, FsdpArguments(cpu_offload=True), "fsdp.cpu_offload is not available"),
        ("cpu", 4, FsdpArguments(sharding="hybrid"), "fsdp.shard_ranks is not given, and a host has 1"),
        ("cpu", 4, FsdpArguments(sharding="hybrid", shard_ranks=3), "divide all 4 into several copies, but fsdp.shard_ranks is 3"),
        ("cpu", 4, FsdpArguments(sharding="hybrid", shard_ranks=4), "use full or none"),
    ],
)
def test_sharding_that_the_device_cannot_do(kind, world_size, fsdp, sentence):
    world = World(RankFacts(world_size=world_size), Device(kind, None, "gloo", False, 1))
    with pytest.raises(InvalidArguments, match=sentence):
        check_sharding(fsdp, world)


def test_cpu_offload_is_refused_before_anything_is_loaded(arguments, device, world):
    with pytest.raises(InvalidArguments, match=r"fsdp\.cpu_offload"):
        load_model(arguments(model_path="/nowhere", fsdp=FsdpArguments(cpu_offload=True)), device, world)


@pytest.mark.parametrize(
    ("args", "positions", "expected"),
    [
        ({}, None, (4096, 4096)),
        ({}, 2048, (2048, 4096)),
        ({}, 131072, (4096, 4096)),
        ({"max_seq_len": 8192}, 131072, (8192, 8192)),
        ({"max_seq_len": 100, "max_batch_len": 300}, 2048, (100, 300)),
        ({"max_batch_len": 300}, 2048, (300, 300)),
    ],
)
def test_sequence_limits(arguments, args, positions, expected):
    assert sequence_limits(arguments(**args), positions) == expected


def test_a_sample_longer_than_the_model_allows_is_refused(arguments):
    with pytest.raises(InvalidArguments, match="lower it to 2048"):
        sequence_limits(arguments(max_seq_len=4096), 2048)


# What is no loadable model.


def _copy(tiny, folder):
    shutil.copytree(tiny, folder)
    return folder


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/no/such/folder", "does not exist"),
        ("../models/x", "does not exist"),
        ("a/b/c", "does not exist"),
        ("{tmp}", "no config.json"),
        ("{tmp}/file", "is a file"),
        ("{tmp}/gguf", "convert it"),
        ("{tmp}/adapter", "is an adapter of some/base"),
    ],
)
def test_paths_that_lead_to_no_model(arguments, tmp_path, path, sentence):
    (tmp_path / "file").write_text("x")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "a.gguf").write_text("x")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ModelNotFound, match=sentence):
        load_tokenizer(arguments(model_path=path.format(tmp=tmp_path)))


def test_a_hub_id_without_network_is_not_found(arguments, device, world):
    with pytest.raises(ModelNotFound, match="some-owner/some-model"):
        load_tokenizer(arguments(model_path="some-owner/some-model"))


def test_cut_short_weights(tiny, arguments, device, world, tmp_path):
    folder = _copy(tiny, tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(ModelNotFound, match="damaged or cut short"):
        load_model(arguments(model_path=str(folder)), device, world)


def test_missing_weights_are_never_made_up(tiny, arguments, device, world, tmp_path):
    folder = _copy(tiny, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"lack 1 weights, e\.g\. model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(arguments(model_path=str(folder)), device, world)


def test_pickled_weights_are_not_read(tiny, arguments, device, world, tmp_path):
    folder = _copy(tiny, tmp_path / "m")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="safetensors"):
        load_model(arguments(model_path=str(folder)), device, world)


def test_quantised_models_are_refused(tiny, arguments, device, world, tmp_path):
    folder = _copy(tiny, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArguments, match="is quantised"):
        load_model(arguments(model_path=str(folder)), device, world)


def test_code_from_a_model_folder_is_never_run(tiny, arguments, device, world, tmp_path):
    folder = _copy(tiny, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InvalidArguments, match="of a kind that cannot be loaded"):
        load_model(arguments(model_path=str(folder)), device, world, tokenizer=object())
    assert not (tmp_path / "ran").exists()


# Tokenizers.


def test_the_template_of_the_job_goes_before_the_models(arguments):
    assert load_tokenizer(arguments()).chat_template == CHATML
    own = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert load_tokenizer(arguments(chat_template=own)).chat_template == own
    with pytest.raises(InvalidArguments, match="neither a shipped name"):
        load_tokenizer(arguments(chat_template="llama99"))


def test_a_model_without_template_needs_one_named(arguments, tmp_path):
    folder = str(tiny_model(tmp_path, chat_template=None, layers=1))
    with pytest.raises(InvalidArguments, match="no chat template; name one by chat_template"):
        load_tokenizer(arguments(model_path=folder))
    assert load_tokenizer(arguments(model_path=folder, chat_template="chatml")).chat_template == CHATML


def test_a_tokenizer_without_padding_pads_with_its_end(arguments, tiny, tmp_path):
    folder = _copy(tiny, tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(arguments(model_path=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArguments, match="no end token"):
        load_tokenizer(arguments(model_path=str(folder)))


def test_a_model_without_known_blocks_is_refused():
    assert len(find_blocks(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()), ["Linear"])) == 1
    with pytest.raises(InvalidArguments, match="does not say what its transformer blocks are"):
        find_blocks(torch.nn.Sequential(), ["Linear"])


def test_lora_and_master_weights_together(arguments, device, world, batch):
    losses, model = _losses(arguments(learning_rate=1e-2, lora=LoraArguments(), dtype="bf16"), device, world, batch)
    assert model.kind == "adapter"
    assert losses[-1] < losses[0]
