"""llama-stack's requests as ours, and our errors in its words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from pydantic import ValidationError

from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.base import no_effect
from posttrain_service.wire.errors import field_errors, summary
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.wire.llama_request import (
    DataConfig,
    DpoConfig,
    EfficiencyConfig,
    LoraConfig,
    PreferenceOptimize,
    QatConfig,
    SupervisedFineTune,
    TrainingConfig,
)

_DTYPES = {
    None: "auto", "auto": "auto", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16",
    "fp32": "fp32", "float32": "fp32",
}  # fmt: skip
_QUANTIZERS = {"8da4w": "8da4w", "8da4w-qat": "8da4w", "int4": "int4", "4w-qat": "int4", "int8": "int8"}
_MODULES = {"output_proj": "o_proj"}
"""torchtune's names of layers that have another one in transformers."""
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
OUTPUT_MODULE = "lm_head"
_OTHER_SHAPES = {"instruct": "llama_stack_dialog", "dialog": "llama_stack_instruct"}
"""Shapes of rows that a data_format does not mean."""
_OLD_REWARDS = ("reward_scale", "reward_clip", "epsilon", "gamma")
_OLD_BETA = 0.1
_DATA, _OPTIMIZER = "training_config.data_config", "training_config.optimizer_config"
_NAMES = {
    "dataset": f"{_DATA}.dataset_id",
    "validation_dataset": f"{_DATA}.validation_dataset_id",
    "training.num_epochs": "training_config.n_epochs",
    "training.max_steps_per_epoch": "training_config.max_steps_per_epoch",
    "training.effective_batch_size": f"{_DATA}.batch_size",
    "training.shuffle": f"{_DATA}.shuffle",
    "training.train_on": f"{_DATA}.train_on_input",
    "training.is_padding_free": f"{_DATA}.packed",
    "training.max_validation_steps": "training_config.max_validation_steps",
    "training.optimizer": f"{_OPTIMIZER}.optimizer_type",
    "training.learning_rate": f"{_OPTIMIZER}.lr",
    "training.weight_decay": f"{_OPTIMIZER}.weight_decay",
    "training.warmup_steps": f"{_OPTIMIZER}.num_warmup_steps",
    "training.activation_checkpointing": "training_config.efficiency_config.enable_activation_checkpointing",
    "training.activation_offloading": "training_config.efficiency_config.enable_activation_offloading",
    "training.fsdp.cpu_offload": "training_config.efficiency_config.fsdp_cpu_offload",
    "training.dtype": "training_config.dtype",
    "training.qat": "algorithm_config",
    "adapter.target_modules": "algorithm_config.lora_attn_modules",
    "adapter": "algorithm_config",
    "method": "algorithm_config",
    "loggers.0": "logger_config",
    "loggers": "logger_config",
}
"""Fields of our request, and those of llama-stack's that they were made from."""
_SPOKEN = re.compile("|".join(rf"{re.escape(name)}\b" for name in sorted(_NAMES, key=len, reverse=True) if "." in name))


@dataclass(frozen=True)
class LlamaAsked:
    """A translated request."""

    request: JobRequest
    unwanted: frozenset[str]
    """Shapes of rows that are not of the data_format."""
    warnings: tuple[str, ...]


def inward(job_uuid: str) -> str:
    """llama-stack's id of a job as ours: itself where it has our form, else percent-encoded."""
    return job_uuid.replace(".", "%2E") if job_uuid in (".", "..") else quote(job_uuid, safe="")


def outward(job_uuid: str) -> str:
    """Our id of a job as llama-stack's clients know it."""
    return unquote(job_uuid)


def translate_sft(body: SupervisedFineTune) -> LlamaAsked:
    """Supervised fine-tuning as our request.

    Raises:
        InvalidRequest: A value that cannot be honoured, by its name.
    """
    if body.model is None:
        raise _refused("model", "is needed: name a model of this server or the hub")
    if body.checkpoint_dir is not None:
        raise _refused("checkpoint_dir", "must be left out: this server keeps checkpoints where its jobs are, and artifacts tell their paths")
    data = _data(body.training_config)
    training, warnings = _training(body.training_config, data)
    training["train_on"] = "all" if data.train_on_input else "last_assistant" if data.data_format == "instruct" else "assistant"
    made: dict[str, Any] = {"model": body.model, "training": training}
    if isinstance(body.algorithm_config, LoraConfig):
        made["adapter"] = _lora(body.algorithm_config)
    elif isinstance(body.algorithm_config, QatConfig):
        training["qat"] = _qat(body.algorithm_config)
    unwanted = frozenset({_OTHER_SHAPES[data.data_format]})
    return _asked(body, made, data, unwanted, warnings)


def translate_dpo(body: PreferenceOptimize) -> LlamaAsked:
    """Preference training as our request.

    Raises:
        InvalidRequest: A value that cannot be honoured, by its name.
    """
    data = _data(body.training_config)
    if data.train_on_input:
        raise _refused(f"{_DATA}.train_on_input", "has no meaning with preference_optimize, which compares answers; leave it out")
    training, warnings = _training(body.training_config, data)
    method, told = _dpo(body.algorithm_config)
    warnings += [*told, f"{_DATA}.data_format has no effect with preference_optimize: its rows are pairs of answers"]
    made = {"model": body.finetuned_model, "training": training, "method": method}
    return _asked(body, made, data, frozenset(), warnings)


def retold(error: InvalidRequest, model: str = "model") -> InvalidRequest:
    """The same error in the words of llama-stack's request.

    Args:
        error: In the words of ours.
        model: What the request calls its model.
    """
    message = error.message
    for name in ("validation_dataset", "dataset"):
        if message.startswith((f"{name} ", f"{name}:")):
            message = _NAMES[name] + message[len(name) :]
    message = _SPOKEN.sub(lambda found: _NAMES[found[0]], message)
    param = None if error.param is None else model if error.param == "model" else llama_name(error.param)
    return InvalidRequest(message, code=error.code, param=param, errors=error.errors)


def llama_name(path: str) -> str:
    """The field of llama-stack's request that one of ours was made from."""
    for name in sorted(_NAMES, key=len, reverse=True):
        if path == name or path.startswith(f"{name}."):
            return _NAMES[name] + path[len(name) :]
    return path


def _asked(
    body: SupervisedFineTune | PreferenceOptimize, made: dict[str, Any], data: DataConfig, unwanted: frozenset[str], warnings: Sequence[str]
) -> LlamaAsked:
    if body.hyperparam_search_config:
        raise _refused("hyperparam_search_config", "must be empty: this server searches no hyperparameters")
    if body.logger_config:
        made["loggers"] = [body.logger_config]
    made["dataset"] = data.dataset_id
    if data.validation_dataset_id is not None:
        made["validation_dataset"] = data.validation_dataset_id
    request = _job_request(made).model_copy(update={"job_uuid": inward(body.job_uuid)})
    return LlamaAsked(request, unwanted, (*no_effect(body), *warnings))


def _data(config: TrainingConfig) -> DataConfig:
    if config.data_config is None:
        raise _refused(_DATA, "is needed: it names the data set")
    return config.data_config


def _training(config: TrainingConfig, data: DataConfig) -> tuple[dict[str, Any], list[str]]:
    """The trainer's knobs, and what the one who asked should know."""
    training: dict[str, Any] = {
        "num_epochs": config.n_epochs,
        "effective_batch_size": data.batch_size * config.gradient_accumulation_steps,
        "shuffle": data.shuffle,
        "is_padding_free": bool(data.packed),
        "dtype": _one_of(_DTYPES, config.dtype, "training_config.dtype"),
    }
    warnings = []
    if config.max_steps_per_epoch:
        training["max_steps_per_epoch"] = config.max_steps_per_epoch
    if config.max_steps_per_epoch == 1:
        warnings.append(
            "training_config.max_steps_per_epoch is 1, the default: each epoch ends after one optimizer step of "
            f"{training['effective_batch_size']} rows; send 0 to train on all rows"
        )
    if data.validation_dataset_id is None:
        if "max_validation_steps" in config.model_fields_set and config.max_validation_steps is not None:
            warnings.append(f"training_config.max_validation_steps has no effect without {_DATA}.validation_dataset_id")
    elif config.max_validation_steps:
        training["max_validation_steps"] = config.max_validation_steps
        if config.max_validation_steps == 1:
            warnings.append(
                "training_config.max_validation_steps is 1, the default: each validation looks at one micro-batch; send 0 for all rows"
            )
    if (optimizer := config.optimizer_config) is not None:
        training |= {
            "optimizer": optimizer.optimizer_type,
            "learning_rate": optimizer.lr,
            "weight_decay": optimizer.weight_decay,
            "warmup_steps": optimizer.num_warmup_steps,
        }
    if config.efficiency_config is not None:
        training |= _efficiency(config.efficiency_config)
    return training, warnings


def _efficiency(config: EfficiencyConfig) -> dict[str, Any]:
    if config.memory_efficient_fsdp_wrap:
        name = "training_config.efficiency_config.memory_efficient_fsdp_wrap"
        raise _refused(name, "cannot be honoured by this server; leave it out")
    knobs: dict[str, Any] = {"activation_checkpointing": bool(config.enable_activation_checkpointing)}
    if config.enable_activation_offloading:
        knobs["activation_offloading"] = True
    return knobs | ({"fsdp": {"cpu_offload": True}} if config.fsdp_cpu_offload else {})


def _lora(config: LoraConfig) -> dict[str, Any]:
    modules = [_MODULES.get(name, name) for name in config.lora_attn_modules]
    modules += [*MLP_MODULES] * config.apply_lora_to_mlp + [OUTPUT_MODULE] * config.apply_lora_to_output
    if not modules:
        raise _refused("algorithm_config.lora_attn_modules", "names no layers, and neither mlp nor output are adapted: nothing would be trained")
    return {
        "kind": "lora",
        "rank": config.rank,
        "alpha": config.alpha,
        "target_modules": list(dict.fromkeys(modules)),
        "use_dora": bool(config.use_dora),
        "quantize_base": bool(config.quantize_base),
    }


def _qat(config: QatConfig) -> dict[str, Any]:
    name = _one_of(_QUANTIZERS, config.quantizer_name, "algorithm_config.quantizer_name")
    return {"quantizer_name": name, "group_size": config.group_size}


def _dpo(config: DpoConfig) -> tuple[dict[str, Any], list[str]]:
    old = [name for name in _OLD_REWARDS if getattr(config, name) is not None]
    if config.beta is None and not old:
        raise _refused("algorithm_config.beta", "is needed")
    warnings = []
    if old:
        warnings.append(
            f"{', '.join(f'algorithm_config.{name}' for name in old)} are of an older llama-stack and have no effect; "
            f"beta is {_OLD_BETA if config.beta is None else config.beta}"
        )
    beta = _OLD_BETA if config.beta is None else config.beta
    return {"kind": "dpo", "beta": beta, "loss_type": config.loss_type}, warnings


def _one_of(known: Mapping[Any, str], value: str | None, name: str) -> str:
    if value not in known:
        names = ", ".join(str(item) for item in known if item is not None)
        raise _refused(name, f"{value!r} is none of {names}")
    return known[value]


def _job_request(made: Mapping[str, Any]) -> JobRequest:
    try:
        return JobRequest.model_validate(made)
    except ValidationError as error:
        faults = field_errors(error.errors(include_url=False), dict(made), llama_name)
        raise InvalidRequest(summary(faults), param=faults[0]["loc"] or None, errors=faults) from error


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {why}", code="unsupported_value", param=name)
