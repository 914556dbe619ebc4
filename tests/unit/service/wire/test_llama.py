"""llama-stack's requests and answers, translated: tables of examples, and a walk over every field that there is."""

from __future__ import annotations

import copy
import types
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.domain.registered import RegisteredSet
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.llama_request import PreferenceOptimize, SupervisedFineTune
from posttrain_service.wire.llama_translate import inward, llama_name, outward, retold, translate_dpo, translate_sft
from posttrain_service.wire.llama_views import artifacts_json, dataset_json, job_entry, rows_json, status_json
from posttrain_service.work.services import JobView

DATA = {"dataset_id": "rows", "batch_size": 2, "shuffle": True, "data_format": "dialog"}
ADAM = {"optimizer_type": "adamw", "lr": 1e-4, "weight_decay": 0.1, "num_warmup_steps": 3}
LORA = {"type": "LoRA", "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False, "apply_lora_to_output": False, "rank": 8, "alpha": 16}
QAT = {"type": "QAT", "quantizer_name": "8da4w", "group_size": 32}
DPO = {"beta": 0.2}
OLD_DPO = {"reward_scale": 1.0, "reward_clip": 2.0, "epsilon": 0.1, "gamma": 0.5}


def config(**changes: Any) -> dict[str, Any]:
    return {"n_epochs": 1, "max_steps_per_epoch": 0, "data_config": DATA} | changes


def sft(**changes: Any) -> dict[str, Any]:
    return {"job_uuid": "j", "training_config": config(), "hyperparam_search_config": {}, "logger_config": {}, "model": "m"} | changes


def dpo(**changes: Any) -> dict[str, Any]:
    return {
        "job_uuid": "j", "training_config": config(), "hyperparam_search_config": {}, "logger_config": {}, "finetuned_model": "m",
        "algorithm_config": DPO,
    } | changes  # fmt: skip


def translated(body: dict[str, Any]):
    return translate_dpo(PreferenceOptimize.model_validate(body)) if "finetuned_model" in body else translate_sft(SupervisedFineTune.model_validate(body))


BASE = {"num_epochs": 1, "effective_batch_size": 2, "shuffle": True, "is_padding_free": False, "dtype": "bf16", "train_on": "assistant"}
ADAPTER = {"kind": "lora", "rank": 8, "alpha": 16, "target_modules": ["q_proj"], "use_dora": False, "quantize_base": False}


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({}, {}),
        ({"training_config": config(n_epochs=3, max_steps_per_epoch=5)}, {"training": {"num_epochs": 3, "max_steps_per_epoch": 5}}),
        ({"training_config": config(gradient_accumulation_steps=4)}, {"training": {"effective_batch_size": 8}}),
        ({"training_config": config(data_config=DATA | {"packed": True})}, {"training": {"is_padding_free": True}}),
        ({"training_config": config(data_config=DATA | {"packed": None, "shuffle": False})}, {"training": {"shuffle": False}}),
        ({"training_config": config(data_config=DATA | {"data_format": "instruct"})}, {"training": {"train_on": "last_assistant"}}),
        ({"training_config": config(data_config=DATA | {"train_on_input": True})}, {"training": {"train_on": "all"}}),
        (
            {"training_config": config(data_config=DATA | {"validation_dataset_id": "v"}, max_validation_steps=7)},
            {"training": {"max_validation_steps": 7}, "validation_dataset": "v"},
        ),
        ({"training_config": config(data_config=DATA | {"validation_dataset_id": "v"}, max_validation_steps=None)}, {"validation_dataset": "v"}),
        (
            {"training_config": config(optimizer_config=ADAM)},
            {"training": {"optimizer": "adamw", "learning_rate": 1e-4, "weight_decay": 0.1, "warmup_steps": 3}},
        ),
        ({"training_config": config(dtype="float32")}, {"training": {"dtype": "fp32"}}),
        ({"training_config": config(dtype=None)}, {"training": {"dtype": "auto"}}),
        (
            {"training_config": config(efficiency_config={"enable_activation_checkpointing": True, "fsdp_cpu_offload": True})},
            {"training": {"activation_checkpointing": True, "fsdp": {"cpu_offload": True}}},
        ),
        (
            {"training_config": config(efficiency_config={"enable_activation_offloading": True})},
            {"training": {"activation_checkpointing": False, "activation_offloading": True}},
        ),
        ({"algorithm_config": LORA}, {"adapter": ADAPTER}),
        (
            {"algorithm_config": LORA | {"lora_attn_modules": ["output_proj"], "apply_lora_to_mlp": True, "apply_lora_to_output": True, "use_dora": True}},
            {"adapter": ADAPTER | {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"], "use_dora": True}},
        ),
        ({"algorithm_config": QAT}, {"training": {"qat": {"quantizer_name": "8da4w", "group_size": 32}}}),
        ({"algorithm_config": QAT | {"quantizer_name": "4w-qat"}}, {"training": {"qat": {"quantizer_name": "int4", "group_size": 32}}}),
        ({"logger_config": {"kind": "tensorboard"}}, {"loggers": [{"kind": "tensorboard"}]}),
    ],
)  # fmt: skip
def test_supervised_requests(asked, made):
    got = translated(sft(**asked))
    training = BASE | made.pop("training", {})
    dumped = got.request.model_dump(mode="json", exclude_unset=True)
    assert dumped == {"model": "m", "dataset": "rows", "job_uuid": "j", "training": training} | made
    assert got.warnings == ()


@pytest.mark.parametrize(
    ("algorithm", "method", "told"),
    [
        (DPO, {"kind": "dpo", "beta": 0.2, "loss_type": "sigmoid"}, None),
        *[({"beta": 1, "loss_type": kind}, {"kind": "dpo", "beta": 1.0, "loss_type": kind}, None) for kind in ("sigmoid", "hinge", "ipo", "kto_pair")],
        (OLD_DPO, {"kind": "dpo", "beta": 0.1, "loss_type": "sigmoid"}, "reward_scale, algorithm_config.reward_clip, algorithm_config.epsilon, algorithm_config.gamma"),
        (DPO | {"epsilon": 1.0}, {"kind": "dpo", "beta": 0.2, "loss_type": "sigmoid"}, "algorithm_config.epsilon are"),
    ],
)  # fmt: skip
def test_preference_requests(algorithm, method, told):
    got = translated(dpo(algorithm_config=algorithm))
    assert got.request.model_dump(mode="json", exclude_unset=True)["method"] == method
    assert "train_on" not in got.request.training.model_fields_set
    assert got.warnings[-1].startswith("training_config.data_config.data_format has no effect")
    assert len(got.warnings) == (1 if told is None else 2)
    assert told is None or told in got.warnings[0]


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"training_config": {"n_epochs": 1, "data_config": DATA}}, "one optimizer step of 2 rows; send 0"),
        ({"training_config": config(max_validation_steps=3)}, "max_validation_steps has no effect without"),
        ({"training_config": config(data_config=DATA | {"validation_dataset_id": "v"})}, "looks at one micro-batch"),
        ({"surprise": 1}, "surprise is not known"),
        ({"training_config": config(data_config=DATA | {"surprise": 1})}, "training_config.data_config.surprise is not known"),
        ({"algorithm_config": LORA | {"surprise": 1}}, "algorithm_config.surprise is not known"),
    ],
)
def test_what_would_surprise_is_told(asked, word):
    [warning] = translated(sft(**asked)).warnings
    assert word in warning


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (sft(model=None), "model"),
        (sft(checkpoint_dir="/etc"), "checkpoint_dir"),
        (sft(hyperparam_search_config={"lr": [1]}), "hyperparam_search_config"),
        (dpo(hyperparam_search_config={"lr": [1]}), "hyperparam_search_config"),
        (sft(logger_config={"kind": "paper"}), "logger_config"),
        (sft(training_config=config(data_config=None)), "training_config.data_config"),
        (sft(training_config=config(dtype="int8")), "training_config.dtype"),
        (sft(training_config=config(efficiency_config={"memory_efficient_fsdp_wrap": True})), "training_config.efficiency_config.memory_efficient_fsdp_wrap"),
        (sft(algorithm_config=LORA | {"lora_attn_modules": []}), "algorithm_config.lora_attn_modules"),
        (sft(algorithm_config=QAT | {"quantizer_name": "fp4"}), "algorithm_config.quantizer_name"),
        (sft(training_config=config(gradient_accumulation_steps=10**6)), "training_config.data_config.batch_size"),
        (dpo(algorithm_config={}), "algorithm_config.beta"),
        (dpo(training_config=config(data_config=DATA | {"train_on_input": True})), "training_config.data_config.train_on_input"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body, param):
    with pytest.raises(InvalidRequest) as caught:
        translated(body)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        {key: value for key, value in sft().items() if key != "hyperparam_search_config"},
        sft(job_uuid=""), sft(job_uuid="a\x00"), sft(training_config=config(n_epochs=0)), sft(training_config=config(max_steps_per_epoch=-1)),
        sft(training_config=config(data_config=DATA | {"data_format": "table"})), sft(training_config=config(data_config=DATA | {"batch_size": True})),
        sft(algorithm_config={key: value for key, value in LORA.items() if key != "type"}), sft(algorithm_config=LORA | {"rank": 0}),
        sft(training_config=config(optimizer_config=ADAM | {"optimizer_type": "lion"})), dpo(algorithm_config={"beta": 0}),
        dpo(algorithm_config=DPO | {"loss_type": "simpo"}), {**dpo(), "finetuned_model": None},
    ],
)  # fmt: skip
def test_malformed_requests(body):
    with pytest.raises(ValidationError):
        translated(body)


# ---- every field of every model ----

OTHER: dict[str, Any] = {
    "job_uuid": "k", "model": "n", "finetuned_model": "n", "checkpoint_dir": "x", "hyperparam_search_config": {"a": 1},
    "logger_config": {"kind": "tensorboard"}, "dataset_id": "other", "batch_size": 5, "shuffle": False, "data_format": "instruct",
    "validation_dataset_id": "held-out", "packed": True, "train_on_input": True, "optimizer_type": "sgd", "lr": 0.5, "weight_decay": 0.5,
    "num_warmup_steps": 9, "enable_activation_checkpointing": True, "enable_activation_offloading": True, "memory_efficient_fsdp_wrap": True,
    "fsdp_cpu_offload": True, "n_epochs": 4, "max_steps_per_epoch": 6, "gradient_accumulation_steps": 3, "max_validation_steps": 8, "dtype": "fp32",
    "type": None, "lora_attn_modules": ["v_proj"], "apply_lora_to_mlp": True, "apply_lora_to_output": True, "rank": 3, "alpha": 5, "use_dora": True,
    "quantize_base": True, "quantizer_name": "int8", "group_size": 64, "beta": 0.9, "loss_type": "ipo", "reward_scale": 3.0, "reward_clip": 3.0,
    "epsilon": 3.0, "gamma": 3.0,
}  # fmt: skip
"""By the field's name a value that is not the one of the base request; None = told by another test."""
REFUSED = {"checkpoint_dir", "hyperparam_search_config", "memory_efficient_fsdp_wrap"}
FULL = config(optimizer_config=ADAM, efficiency_config={})
BODIES = [
    (SupervisedFineTune, sft(training_config=FULL, algorithm_config=LORA)),
    (SupervisedFineTune, sft(training_config=FULL, algorithm_config=QAT)),
    (PreferenceOptimize, dpo(training_config=FULL)),
]


def fields(model: type[BaseModel], body: dict[str, Any], path: tuple[str, ...] = ()):
    """Path and name of every field, following the branch of a union that `body` is of."""
    for name, info in model.model_fields.items():
        inner = [part for part in parts(info.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        value = body.get(name)
        if inner and isinstance(value, dict):
            [branch] = [one for one in inner if value.get("type", "") in (("",) if "type" not in one.model_fields else get_args(one.model_fields["type"].annotation))]
            yield from fields(branch, value, (*path, name))
        else:
            yield (*path, name)


def parts(annotation: Any):
    if get_origin(annotation) is Annotated:
        return parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [piece for part in get_args(annotation) for piece in parts(part)]
    return [annotation]


WALK = [(body, path) for model, body in BODIES for path in fields(model, body)]


def test_the_walk_knows_every_field():
    assert len(WALK) > 70
    assert {path[-1] for _, path in WALK} == set(OTHER)


@pytest.mark.parametrize(("body", "path"), WALK, ids=lambda part: ".".join(part) if isinstance(part, tuple) else part.get("algorithm_config", {}).get("type", "DPO"))
def test_each_field_changes_the_run_or_is_refused_or_told_by_name(body, path):
    if path[-1] == "type":  # which of the two is meant: the tables above show both
        return
    changed = copy.deepcopy(body)
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = OTHER[path[-1]]
    before = translated(body)
    if path[-1] in REFUSED or (path[-2:] == ("data_config", "train_on_input") and "finetuned_model" in body):
        with pytest.raises(InvalidRequest) as caught:
            translated(changed)
        assert caught.value.param == ".".join(path)
        return
    after = translated(changed)
    if path[-1] == "job_uuid":
        assert after.request.job_uuid == "k"
        return
    arguments = [asked.request.train_args(model_path=asked.request.model, data_path=asked.request.dataset, ckpt_output_dir="run",
                                          validation_data_path=asked.request.validation_dataset) for asked in (before, after)]  # fmt: skip
    told = [warning for warning in after.warnings if warning not in before.warnings]
    assert arguments[0] != arguments[1] or any(path[-1] in warning for warning in told + list(after.warnings))


# ---- ids, errors, answers ----


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("a-1.b_c", "a-1.b_c"), ("a b", "a%20b"), ("a/b", "a%2Fb"), ("a%20b", "a%2520b"), ("..", "%2E%2E"), (".", "%2E"), ("ü:1", "%C3%BC%3A1"), ("-x", "-x")],
)
def test_ids_are_carried_over_and_back(theirs, ours):
    assert (inward(theirs), outward(ours)) == (ours, theirs)


@pytest.mark.parametrize(
    ("message", "param", "told", "name"),
    [
        ("dataset is 'x', and there is none", "dataset", "training_config.data_config.dataset_id is 'x', and there is none", "training_config.data_config.dataset_id"),
        ("dataset: 1 of 2 rows", "dataset", "training_config.data_config.dataset_id: 1 of 2 rows", "training_config.data_config.dataset_id"),
        ("training.fsdp.cpu_offload moves", "training.fsdp.cpu_offload", "training_config.efficiency_config.fsdp_cpu_offload moves", "training_config.efficiency_config.fsdp_cpu_offload"),
        ("set training.invalid_rows", "training.invalid_rows", "set training.invalid_rows", "training.invalid_rows"),
        ("model 'x' is unknown", "model", "model 'x' is unknown", "finetuned_model"),
        ("nothing", None, "nothing", None),
    ],
)  # fmt: skip
def test_errors_speak_of_what_the_client_wrote(message, param, told, name):
    error = retold(InvalidRequest(message, code="c", param=param, errors=[{"line": 1}]), "finetuned_model")
    assert (error.message, error.param, error.code, list(error.errors)) == (told, name, "c", [{"line": 1}])


def test_names_are_longest_first():
    assert llama_name("adapter.target_modules.0") == "algorithm_config.lora_attn_modules.0"
    assert llama_name("adapter.rank") == "algorithm_config.rank"
    assert llama_name("loggers.0.kind") == "logger_config.kind"


def job(**changes: Any) -> Job:
    return Job(
        **{
            "run_id": "11111111-1111-1111-1111-111111111111", "job_uuid": "a%2Fb", "owner": "default", "state": JobState.SUCCEEDED, "method": "sft",
            "model": "m", "spec": {}, "body_digest": "", "created_at": 0.0, "started_at": 1.0, "ended_at": 2.0, "warnings": ["w"],
        } | changes
    )  # fmt: skip


def checkpoint(**metrics: Any) -> dict[str, Any]:
    return {"id": "step-000004", "step": 4, "epoch": 2.0, "created_at": 1.5, "files": [], "metrics": metrics}


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"loss": 1.0, "validation_loss": 0.0}, {"epoch": 2, "train_loss": 1.0, "validation_loss": 0.0, "perplexity": 1.0}),
        ({"loss": 1}, {"epoch": 2, "train_loss": 1.0, "validation_loss": None, "perplexity": None}),
        ({"loss": float("nan"), "validation_loss": 1000.0}, {"epoch": 2, "train_loss": None, "validation_loss": 1000.0, "perplexity": None}),
        ({}, None),
    ],
)
def test_checkpoints_have_their_metrics(metrics, told):
    view = JobView(job(), checkpoints=[checkpoint(**metrics)])
    [shown] = artifacts_json(view, "/s/")["checkpoints"]
    assert shown == {
        "identifier": "ft:m:posttrain::a%2Fb:ckpt-step-4", "created_at": "1970-01-01T00:00:01.500000Z", "epoch": 2, "post_training_job_id": "a/b",
        "path": "/s/jobs/11111111-1111-1111-1111-111111111111/checkpoints/step-000004/model", "training_metrics": told,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "status"),
    [("queued", "scheduled"), ("launching", "scheduled"), ("running", "in_progress"), ("stopping", "in_progress"), ("paused", "scheduled"),
     ("succeeded", "completed"), ("failed", "failed"), ("cancelled", "cancelled")],
)  # fmt: skip
def test_a_status_has_every_key(state, status):
    shown = status_json(JobView(job(state=JobState(state), error={"code": "c", "message": "m"}), progress={"step": 1}), "")
    assert shown == {
        "job_uuid": "a/b", "checkpoints": [], "status": status, "scheduled_at": "1970-01-01T00:00:00.000000Z", "resources_allocated": None,
        "started_at": "1970-01-01T00:00:01.000000Z", "completed_at": "1970-01-01T00:00:02.000000Z", "warnings": ["w"], "progress": {"step": 1},
        "error": {"code": "c", "message": "m", "rank": None, "log_tail": None},
    }  # fmt: skip
    assert job_entry("a%2Fb", JobState(state)) == {"job_uuid": "a/b", "status": status}


def test_data_sets_and_rows():
    made = RegisteredSet("d", "o", "p", {"type": "rows"}, "file-1", 0.0, {"a": 1})
    assert dataset_json(made) == {
        "type": "dataset", "identifier": "d", "provider_resource_id": "file-1", "provider_id": "posttrain", "purpose": "p",
        "source": {"type": "rows", "rows": []}, "metadata": {"a": 1},
    }  # fmt: skip
    assert rows_json([{"a": float("nan")}], has_more=True) == {"data": [{"a": None}], "has_more": True, "url": None}
