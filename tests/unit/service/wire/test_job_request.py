"""Every field of a job request changes what is trained or stored, and what cannot be honoured is refused by name."""

import pytest
from pydantic import ValidationError

from posttrain_service.wire.errors import field_errors, summary
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.wire.knobs import OWNED_PATHS, TorchrunKnobs, TrainingKnobs
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

PATHS = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "r"}
BASE = {"model": "m", "dataset": "file-1"}

# A value other than the default for every knob of the trainer, with what else it needs.
KNOBS = {
    "max_seq_len": 128,
    "max_batch_len": 256,
    "num_epochs": 3,
    "effective_batch_size": 4,
    "save_samples": 10,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
    "is_padding_free": False,
    "random_seed": 7,
    "method": {"kind": "dpo", "beta": 0.2},
    "lora": {"rank": 4, "quantize_base": True},
    "qat": {"group_size": 64},
    "train_on": "all",
    "chat_template": "chatml",
    "max_steps": 9,
    "max_steps_per_epoch": 5,
    "shuffle": False,
    "over_length": "truncate_right",
    "invalid_rows": "skip",
    "max_invalid_rows": 3,
    "optimizer": "sgd",
    "adamw_betas": [0.8, 0.9],
    "adamw_eps": 1e-6,
    "weight_decay": 0.1,
    "max_grad_norm": None,
    "lr_scheduler": "linear",
    "min_lr_ratio": (0.1, {"lr_scheduler": "wsd"}),
    "max_skipped_steps": 2,
    "dtype": "fp32",
    "master_weights": False,
    "device": "cpu",
    "fsdp": {"sharding": "none"},
    "activation_checkpointing": True,
    "activation_offloading": True,
    "attention": "sdpa",
    "deterministic": True,
    "validation_split": 0.1,
    "validation_every_steps": (5, {"validation_split": 0.1}),
    "max_validation_steps": (5, {"validation_split": 0.1}),
    "save_every_steps": 10,
    "save_every_epoch": False,
    "keep_last": 5,
    "keep_best": (1, {"best_metric": "loss"}),
    "best_metric": "loss",
    "resume": "never",
    "async_save": "off",
    "merge_lora": (True, {"lora": {}}),
    "loggers": [{"kind": "tensorboard"}],
    "log_level": "debug",
    "profile_steps": [2, 3],
}


def args(request):
    return request.train_args(**PATHS)


def test_the_table_knows_every_knob():
    assert set(KNOBS) == set(TrainingKnobs.model_fields) == set(FullTrainingArguments.model_fields) - OWNED_PATHS


@pytest.mark.parametrize("name", sorted(KNOBS))
def test_every_training_knob_reaches_the_trainer(name):
    value, needs = KNOBS[name] if isinstance(KNOBS[name], tuple) else (KNOBS[name], {})
    request = JobRequest(**BASE, training={name: value, **needs})
    expected = FullTrainingArguments(**PATHS, **{name: value, **needs})
    assert args(request) == expected
    plain = JobRequest(**BASE, training=needs) if needs else JobRequest(**BASE)
    assert getattr(args(request), name) != getattr(args(plain), name)
    assert request.digest() != plain.digest()


@pytest.mark.parametrize("name", sorted(OWNED_PATHS))
def test_paths_are_the_services(name):
    with pytest.raises(ValidationError, match=name):
        JobRequest(**BASE, training={name: "/etc/passwd"})


def test_paths_that_the_service_gives_reach_the_trainer():
    request = JobRequest(**BASE, validation_dataset="file-2")
    found = request.train_args(**PATHS, validation_data_path="v", data_output_dir="p")
    assert (found.model_path, found.data_path, found.ckpt_output_dir) == ("m", "d", "r")
    assert (found.validation_data_path, found.data_output_dir) == ("v", "p")


@pytest.mark.parametrize(
    ("own", "argument", "value"),
    [
        ({"adapter": {"kind": "lora", "rank": 4, "use_dora": True}}, "lora", {"rank": 4, "use_dora": True}),
        ({"validation_split": 0.2}, "validation_split", 0.2),
        ({"checkpoints": {"every_steps": 7}}, "save_every_steps", 7),
        ({"checkpoints": {"every_epoch": False}}, "save_every_epoch", False),
        ({"checkpoints": {"keep_last": 9}}, "keep_last", 9),
        ({"checkpoints": {"keep_best": 1, "metric": "loss"}}, "keep_best", 1),
        ({"checkpoints": {"metric": "loss"}}, "best_metric", "loss"),
        ({"loggers": [{"kind": "tensorboard"}]}, "loggers", [{"kind": "tensorboard"}]),
        ({"method": {"kind": "dpo", "loss_type": "ipo"}}, "method", {"kind": "dpo", "loss_type": "ipo"}),
        ({"method": {"kind": "pretrain", "block_size": 64}}, "method", {"kind": "pretrain", "block_size": 64}),
    ],
)
def test_names_of_the_requests_own(own, argument, value):
    more = {"best_metric": "loss"} if argument == "keep_best" else {}
    expected = FullTrainingArguments(**PATHS, **{argument: value, **more})
    assert args(JobRequest(**BASE, **own)) == expected
    # The same value a second time is no contradiction.
    assert args(JobRequest(**BASE, **own, training={argument: value})) == expected


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"adapter": {"rank": 4}, "training": {"lora": {"rank": 8}}}, ("adapter", "training.lora")),
        ({"validation_split": 0.2, "training": {"validation_split": 0.1}}, ("validation_split", "0.1")),
        ({"checkpoints": {"keep_last": 3}, "training": {"keep_last": 4}}, ("checkpoints.keep_last", "training.keep_last")),
        ({"checkpoints": {"metric": "loss"}, "training": {"best_metric": "validation_loss"}}, ("checkpoints.metric",)),
        ({"loggers": [], "training": {"loggers": [{"kind": "jsonl"}]}}, ("loggers", "training.loggers")),
        ({"resources": {"devices": 2}, "torchrun": {"nproc_per_node": 1}}, ("resources.devices", "nproc_per_node")),
        ({"resources": {"devices": ["0", "1"]}, "torchrun": {"nproc_per_node": 1}}, ("resources.devices",)),
        ({"resources": {"devices": "auto"}, "torchrun": {"nproc_per_node": 1}}, ("resources.devices",)),
        ({"resources": {"devices": [0, "0"]}}, ("twice",)),
        ({"validation_split": 0.2, "validation_dataset": "file-2"}, ("validation_dataset", "exclude")),
        ({"training": {"validation_split": 0.2}, "validation_dataset": "file-2"}, ("validation_dataset", "exclude")),
        ({"training": {"max_seq_len": 100, "max_batch_len": 50}}, ("max_batch_len", "max_seq_len")),
        ({"training": {"max_validation_steps": 3}}, ("max_validation_steps",)),
        ({"training": {"resume": "step-000100"}}, ("resume",)),
        ({"retention": {"keep": True, "ttl_s": 5}}, ("retention.keep", "ttl_s")),
        ({"retry": {"max_attempts": 3, "on": ["completed"]}}, ("retry.on", "completed")),
        ({"retry": {"on": ["lost"]}}, ("retry.on", "max_attempts")),
        ({"torchrun": {"nproc_per_node": "gpu"}}, ("nproc_per_node", "gpu")),
    ],
)
def test_contradictions_are_named(body, names):
    with pytest.raises(ValidationError) as caught:
        JobRequest(**BASE, **body)
    said = summary(field_errors(caught.value.errors(include_url=False), BASE | body))
    for name in names:
        assert name in said


@pytest.mark.parametrize(
    "torchrun",
    [
        {"nnodes": 2, "rdzv_endpoint": "a:1"},
        {"nnodes": 2, "master_addr": "a", "master_port": 5, "node_rank": 1},
        {"rdzv_endpoint": "a:29500"},
        {"rdzv_id": "7"},
        {"node_rank": 1},
        {"master_addr": "a", "master_port": 5},
    ],
)
def test_other_hosts_are_refused_by_name(torchrun):
    with pytest.raises(ValidationError, match="torchrun\\.(" + "|".join(torchrun) + ")"):
        JobRequest(**BASE, torchrun=torchrun)


def test_torchrun_knobs():
    assert set(TorchrunKnobs.model_fields) == set(TorchrunArguments.model_fields)
    request = JobRequest(**BASE, torchrun={"shutdown_timeout_s": 99, "nproc_per_node": 3})
    assert request.devices == 3
    assert request.torch_args(3) == TorchrunArguments(nproc_per_node=3, shutdown_timeout_s=99)


@pytest.mark.parametrize(
    ("body", "devices"),
    [
        ({}, 1),
        ({"resources": {"devices": 4}}, 4),
        ({"resources": {"devices": "auto"}}, "auto"),
        ({"resources": {"devices": [0, 1]}}, ("0", "1")),
        ({"torchrun": {"nproc_per_node": 2}}, 2),
        ({"torchrun": {"nproc_per_node": "auto"}}, "auto"),
        ({"resources": {"devices": [0, 1]}, "torchrun": {"nproc_per_node": 2}}, ("0", "1")),
    ],
)
def test_devices(body, devices):
    assert JobRequest(**BASE, **body).devices == devices


STORED = {
    "job_uuid": "my-job",
    "name": "a name",
    "model": "other",
    "dataset": {"rows": [{"messages": []}]},
    "validation_dataset": "file-2",
    "validation_split": 0.5,
    "resources": {"priority": 3},
    "retention": {"ttl_s": 60},
    "retry": {"max_attempts": 2},
    "webhook_url": "https://example.org/hook",
    "metadata": {"team": "x"},
    "adapter": {"rank": 2},
    "training": {"num_epochs": 2},
    "torchrun": {"shutdown_timeout_s": 5},
    "checkpoints": {"keep_last": 9},
    "loggers": [{"kind": "tensorboard"}],
    "method": {"kind": "dpo"},
}


def test_every_field_of_the_request_is_part_of_what_is_stored():
    assert set(STORED) == set(JobRequest.model_fields)
    plain = JobRequest(**BASE)
    for name, value in STORED.items():
        request = JobRequest(**{**BASE, name: value})
        assert request.digest() != plain.digest(), name
        # What was said is read back as the same request.
        assert JobRequest.model_validate(request.model_dump(mode="json", exclude_unset=True)).digest() == request.digest()


DIGESTS = (
    "6691a5fbc3d4f868fe61f43a2670e8f0788962d2592d34dfea18e08ef2d746be",
    "428f3904d2c8757093042f42bc435f850d56e85d26cbac60739da1ba91cd5bf2",
)


def test_a_digest_that_is_stored_outlives_new_fields_with_defaults():
    # As a server of the first release stored them: a later one must know its own jobs again.
    assert JobRequest(**BASE).digest() == DIGESTS[0]
    rich = {"adapter": {"rank": 2}, "retry": {"max_attempts": 2, "on": ["lost"]}, "loggers": [{"kind": "tensorboard"}]}
    assert JobRequest(**BASE, **rich, resources={"devices": [0, 1]}).digest() == DIGESTS[1]


def test_the_digest_is_of_the_meaning():
    short = JobRequest(**BASE)
    long = JobRequest(**BASE, training={"num_epochs": 1}, metadata={}, resources={"priority": 0})
    assert short.digest() == long.digest()


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"modle": "m"}, "modle"),
        ({"training": {"lr": 1}}, "training.lr"),
        ({"training": {"num_epochs": 0}}, "training.num_epochs"),
        ({"training": {"learning_rate": -1}}, "training.learning_rate"),
        ({"training": {"learning_rate": "abc"}}, "training.learning_rate"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate"),
        ({"training": {"effective_batch_size": 10**9}}, "training.effective_batch_size"),
        ({"adapter": {"rank": 0}}, "adapter.rank"),
        ({"method": {"kind": "magic"}}, "method"),
        ({"method": {"kind": "dpo", "beta": 0}}, "method.dpo.beta"),
        ({"method": {"kind": "dpo", "loss_type": "ipo", "label_smoothing": 0.1}}, "method.dpo"),
        ({"method": {"kind": "sft", "beta": 0.1}}, "method.sft.beta"),
        ({"method": {"kind": "pretrain", "block_size": 4}}, "method.pretrain.block_size"),
        ({"method": {"kind": "dpo"}, "training": {"train_on": "all"}}, ""),
        ({"method": {"kind": "dpo"}, "training": {"max_seq_len": 64, "max_batch_len": 100}}, ""),
        ({"method": {"kind": "dpo", "precompute_reference": False}}, ""),
        ({"method": {"kind": "pretrain"}, "training": {"chat_template": "chatml"}}, ""),
        ({"method": {"kind": "pretrain"}, "training": {"over_length": "truncate_right"}}, ""),
        ({"adapter": {"rank": 4}, "training": {"qat": {}}}, ""),
        ({"training": {"qat": {"quantizer_name": "int3"}}}, "training.qat.quantizer_name"),
        ({"webhook_url": "ftp://x"}, "webhook_url"),
        ({"webhook_url": "https://user:word@x"}, "webhook_url"),
        ({"webhook_url": "https:///path"}, "webhook_url"),
        ({"webhook_url": "https://x/a b"}, "webhook_url"),
        ({"webhook_url": "https://x/#part"}, "webhook_url"),
        ({"webhook_url": "https://x:99999/"}, "webhook_url"),
        ({"webhook_url": "https://[::1/"}, "webhook_url"),
        ({"job_uuid": "../x"}, "job_uuid"),
        ({"job_uuid": "a" * 129}, "job_uuid"),
        ({"name": "a\x00b"}, "name"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "a\x00"}}, "metadata"),
        ({"dataset": {"rows": []}}, "dataset"),
        ({"dataset": {"rows": [{"text": "\ud800"}]}}, "dataset"),
        ({"dataset": {"rows": [{"text": float("inf")}]}}, "dataset"),
    ],
)
def test_what_cannot_be_honoured_is_refused(body, where):
    with pytest.raises(ValidationError) as caught:
        JobRequest(**{**BASE, **body})
    locations = [".".join(map(str, error["loc"])) for error in caught.value.errors()]
    assert any(location.startswith(where) for location in locations), locations


def test_numbers_as_text_are_numbers():
    assert args(JobRequest(**BASE, training={"learning_rate": "2e-6"})).learning_rate == 2e-6
