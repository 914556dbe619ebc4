"""From a request to what is decided before a job is stored."""

import json

import pytest

from posttrain_service.errors import InvalidRequest
from posttrain_service.settings import Settings
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.work import models
from posttrain_service.work import prepare as preparing
from posttrain_service.work.prepare import torch_arguments, train_arguments
from posttrain_trainer.contract.rundir import RunDir

ROWS = {"rows": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]}
CPU = ["cpu:0", "cpu:1"]


@pytest.fixture
def settings(tmp_path):
    for name, positions in (("tiny", 128), ("long", 100_000)):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    return Settings(storage_dir=tmp_path, stop_grace_s=12.5)


def request(**changes):
    return JobRequest.model_validate({"model": "tiny", "dataset": ROWS} | changes)


def prepare(request, settings, slots):
    return preparing.prepare(request, settings, slots, models.find(request.model, settings.base_models_dir))


def test_every_default_is_filled_in_and_no_path_is_stored(settings):
    prepared = prepare(request(), settings, CPU)
    assert prepared.training["learning_rate"] == 2e-5
    assert (prepared.training["max_seq_len"], prepared.training["max_batch_len"]) == (128, 4096)
    assert prepared.torchrun["shutdown_timeout_s"] == 13
    assert not {name for name in prepared.training if name.endswith(("_path", "_dir"))}


@pytest.mark.parametrize(
    ("model", "training", "lengths"),
    [
        ("long", {}, (4096, 4096)),
        ("long", {"max_batch_len": 1000}, (1000, 1000)),
        ("long", {"max_seq_len": 9000}, (9000, 9000)),
        ("tiny", {"max_seq_len": 64}, (64, 4096)),
        ("org/hub", {}, (None, None)),
    ],
)
def test_lengths(settings, model, training, lengths):
    prepared = prepare(request(model=model, training=training), settings, CPU)
    assert (prepared.training["max_seq_len"], prepared.training["max_batch_len"]) == lengths


def test_a_stored_spec_gives_the_trainers_arguments(settings, tmp_path):
    prepared = prepare(request(adapter={"kind": "lora", "rank": 4}), settings, CPU)
    spec = {"model": "tiny", "training": prepared.training, "torchrun": prepared.torchrun, "data": {"train": "data/train.jsonl"}}
    run_dir = RunDir(tmp_path / "jobs" / "x")
    args = train_arguments(json.loads(json.dumps(spec)), run_dir, settings.base_models_dir)
    assert args.lora is not None
    assert (args.lora.rank, args.learning_rate) == (4, 2e-4)
    assert args.data_path == str(run_dir.path / "data" / "train.jsonl")
    assert args.ckpt_output_dir == str(run_dir.path)
    assert args.model_path == str(tmp_path / "models" / "tiny")
    assert torch_arguments(spec, 2).nproc_per_node == 2


def test_a_longer_sequence_than_the_models_is_refused(settings):
    with pytest.raises(InvalidRequest, match="takes at most 128 tokens") as caught:
        prepare(request(training={"max_seq_len": 129}), settings, CPU)
    assert caught.value.param == "training.max_seq_len"


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"resources": {"devices": 3}}, "resources.devices", "3 devices are asked for, but this host has 2 .*CPU_SLOTS"),
        ({"resources": {"devices": ["cpu:7"]}}, "resources.devices", "no device cpu:7"),
        ({"torchrun": {"nproc_per_node": 5}}, "resources.devices", "5 devices are asked for"),
        ({"training": {"device": "cuda"}}, "training.device", "no such device"),
        ({"training": {"activation_offloading": True}}, "training.activation_offloading", "leave it out"),
        ({"training": {"attention": "flash"}}, "training.attention", "use sdpa or auto"),
        ({"training": {"device": "mps"}}, "training.device", "no Apple machine"),
        ({"training": {"fsdp": {"cpu_offload": True}}}, "training.fsdp.cpu_offload", "trains on the CPU"),
        ({"training": {"dtype": "fp16"}}, "training.dtype", "fp16 cannot train"),
    ],
)
def test_what_this_host_cannot_honour_is_refused_by_name(settings, changes, param, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        prepare(request(**changes), settings, CPU)
    assert caught.value.param == param


@pytest.mark.parametrize("devices", [2, "auto", [0, 1], ["cpu:1"]])
def test_devices_that_can_be_had_are_kept(settings, devices):
    prepared = prepare(request(resources={"devices": devices}), settings, CPU)
    assert prepared.devices == (tuple(str(d) for d in devices) if isinstance(devices, list) else devices)
