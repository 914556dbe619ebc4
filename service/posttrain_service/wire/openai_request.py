"""What `fine_tuning.jobs.create` may send, and how it becomes a JobRequest. Pure.

`auto` values that need the number of rows stay open until the rows have been read; `resolve_auto` then fills them in.
Fields that nothing is known of are let through, as OpenAI's own server does, and told in the job's warnings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from posttrain_service.errors import InvalidRequest, UnsupportedMethod
from posttrain_service.wire.base import JOB_ID, Lenient, Name, no_effect
from posttrain_service.wire.errors import field_errors, summary
from posttrain_service.wire.jobs import CheckpointRules, JobRequest, LoraAdapter, Resources, Retention, Retry
from posttrain_service.wire.knobs import TorchrunKnobs, TrainingKnobs
from posttrain_trainer.contract.loggers import Logger

Auto = Literal["auto"]
LEARNING_RATE, LORA_LEARNING_RATE, DPO_LEARNING_RATE = 2e-5, 2e-4, 5e-7
"""What learning_rate_multiplier multiplies: full fine-tuning, with an adapter, dpo."""
MANY_ROWS = 1000
"""From so many rows on, automatic n_epochs is 1 instead of 3."""
MAX_AUTO_BATCH = 32
_LOGGER: TypeAdapter[Any] = TypeAdapter(Logger)
_METHODS = {"supervised": "sft", "dpo": "dpo"}
_OWN = (
    "adapter", "training", "torchrun", "resources", "checkpoints", "retention", "retry", "webhook_url",
    "validation_split", "job_uuid",
)  # fmt: skip


class Hyperparameters(Lenient):
    """How the training goes."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=10_000)] = "auto"
    """Times that the data set is passed through; auto = 3 under 1,000 rows, else 1."""
    batch_size: Auto | Annotated[int, Field(ge=1, le=1_000_000)] = "auto"
    """Rows in one optimizer step; auto = about a twentieth of the rows, 1 to 32."""
    learning_rate_multiplier: Auto | Annotated[FiniteFloat, Field(gt=0, le=1_000_000)] = "auto"
    """Times 2e-5 (2e-4 with an adapter, 5e-7 for dpo); auto = 1."""
    beta: Auto | Annotated[FiniteFloat, Field(gt=0, le=100)] = "auto"
    """dpo: how closely the model is held to its reference; auto = 0.1."""


class MethodOptions(Lenient):
    """Options of one method."""

    hyperparameters: Hyperparameters | None = None
    """How the training goes."""


class OpenAIMethod(Lenient):
    """The method and its options, under the method's name."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    """supervised or dpo."""
    supervised: MethodOptions | None = None
    """Options of supervised fine-tuning."""
    dpo: MethodOptions | None = None
    """Options of direct preference optimisation."""


class Wandb(Lenient):
    """Where metrics go on Weights & Biases."""

    project: Name
    """Project."""
    name: Name | None = None
    """Display name of the run."""
    entity: Name | None = None
    """Team or user."""
    tags: tuple[Name, ...] | None = None
    """Tags of the run."""


class Integration(Lenient):
    """One integration."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    """wandb."""
    wandb: Wandb | None = None
    """Its options; the key is the server's."""


class CreateFineTuningJob(Lenient):
    """OpenAI's request for a fine-tuning job, with posttrain's own knobs beside it (`extra_body` of the client)."""

    model: Name
    """A model of the server, a hub id, or a fine-tuned model's name."""
    training_file: Name
    """Id of an uploaded file."""
    validation_file: Name | None = None
    """Id of an uploaded file."""
    method: OpenAIMethod | None = None
    """How to train; None = supervised."""
    hyperparameters: Hyperparameters | None = None
    """The older place of supervised hyperparameters."""
    suffix: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")] | None = None
    """Part of the fine-tuned model's name, and the job's name."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seed of everything that is drawn; None = 42."""
    metadata: dict[str, str] | None = None
    """At most 16 notes, to find the job by."""
    integrations: tuple[Integration, ...] | None = None
    """Where metrics go besides."""
    adapter: LoraAdapter | None = None
    """Train an adapter; None = full fine-tuning."""
    training: TrainingKnobs | None = None
    """Every knob of the trainer but the paths."""
    torchrun: TorchrunKnobs | None = None
    """How torchrun starts the ranks."""
    resources: Resources | None = None
    """What the job may use."""
    checkpoints: CheckpointRules | None = None
    """When checkpoints are made and which stay."""
    retention: Retention | None = None
    """How long the ended job stays."""
    retry: Retry | None = None
    """When a failed attempt is followed by another one."""
    webhook_url: str | None = None
    """Where the job's end is told."""
    validation_split: FiniteFloat | None = None
    """Share of the rows held out for validation."""
    job_uuid: Annotated[str, Field(pattern=JOB_ID)] | None = None
    """The job's id, chosen by the client."""


@dataclass(frozen=True)
class Asked:
    """A translated request."""

    request: JobRequest
    auto: tuple[str, ...] = ()
    """Names of training knobs that the rows decide: num_epochs, effective_batch_size, warmup_steps."""
    warnings: tuple[str, ...] = ()


def translate(body: CreateFineTuningJob) -> Asked:
    """OpenAI's request as ours.

    Raises:
        UnsupportedMethod: Neither supervised nor dpo.
        InvalidRequest: A value that cannot be honoured, by its name.
    """
    kind, hyper = _method(body)
    own = {name: _plain(getattr(body, name)) for name in _OWN if getattr(body, name) is not None}
    training: dict[str, Any] = dict(own.get("training", {}))
    auto = _knobs(hyper, kind, _has_adapter(own), training)
    if body.seed is not None:
        _set(training, "random_seed", body.seed, "seed")
    made: dict[str, Any] = own | {"model": body.model, "dataset": body.training_file, "training": training}
    if kind != "sft":
        made["method"] = _dpo(kind, hyper, training)
    if body.validation_file is not None:
        made["validation_dataset"] = body.validation_file
    made |= {"name": body.suffix} if body.suffix else {}
    made |= {"metadata": body.metadata} if body.metadata else {}
    if body.integrations:
        made["loggers"] = [_logger(number, item) for number, item in enumerate(body.integrations)]
    return Asked(_job_request(made), auto, no_effect(body))


def resolve_auto(body: Mapping[str, Any], auto: tuple[str, ...], rows: int) -> JobRequest:
    """The request with its open values chosen for a data set of `rows` good rows.

    Raises:
        InvalidRequest: The values contradict what else was asked for.
    """
    training: dict[str, Any] = dict(body.get("training", {}))
    if "num_epochs" in auto:
        training["num_epochs"] = 3 if rows < MANY_ROWS else 1
    if "effective_batch_size" in auto:
        training["effective_batch_size"] = min(MAX_AUTO_BATCH, max(1, round(rows / 20)))
    if "warmup_steps" in auto:
        steps = training.get("num_epochs", 1) * math.ceil(rows / training.get("effective_batch_size", 32))
        training["warmup_steps"] = round(0.03 * min(steps, training.get("max_steps") or steps))
    return _job_request({**body, "training": training})


def base_rate(kind: str, *, adapter: bool) -> float:
    """The learning rate that a multiplier of 1 means."""
    if kind == "dpo":
        return DPO_LEARNING_RATE
    return LORA_LEARNING_RATE if adapter else LEARNING_RATE


def _method(body: CreateFineTuningJob) -> tuple[str, Hyperparameters]:
    old = body.hyperparameters
    if body.method is None:
        return "sft", old or Hyperparameters()
    named = body.method.type
    if named not in _METHODS:
        raise UnsupportedMethod(
            f"method.type {named!r} is not supported; this server trains by supervised and dpo", param="method.type"
        )
    options: MethodOptions | None = getattr(body.method, named)
    other = "dpo" if named == "supervised" else "supervised"
    if getattr(body.method, other) is not None:
        raise InvalidRequest(f"method.{other} has no effect with method.type {named!r}; leave it out", param=f"method.{other}")
    new = None if options is None else options.hyperparameters
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"hyperparameters and method.{named}.hyperparameters say two different things; give one", param="hyperparameters"
        )
    return _METHODS[named], new or old or Hyperparameters()


def _knobs(hyper: Hyperparameters, kind: str, adapter: bool, training: dict[str, Any]) -> tuple[str, ...]:
    """Set the knobs that are given; the names of those left to the rows."""
    auto = []
    for name, knob in (("n_epochs", "num_epochs"), ("batch_size", "effective_batch_size")):
        value = getattr(hyper, name)
        if value != "auto":
            _set(training, knob, value, name)
        elif knob not in training:
            auto.append(knob)
    if hyper.learning_rate_multiplier != "auto":
        rate = hyper.learning_rate_multiplier * base_rate(kind, adapter=adapter)
        _set(training, "learning_rate", rate, "learning_rate_multiplier")
    if hyper.beta != "auto" and kind != "dpo":
        raise InvalidRequest("beta has no effect with supervised fine-tuning; leave it out", param="hyperparameters.beta")
    if "warmup_steps" not in training:
        auto.append("warmup_steps")
    return tuple(auto)


def _dpo(kind: str, hyper: Hyperparameters, training: dict[str, Any]) -> dict[str, Any]:
    """The method, with the options that training.method gives besides."""
    method: dict[str, Any] = {**training.pop("method", {}), "kind": kind}
    if hyper.beta != "auto":
        _set(method, "beta", hyper.beta, "beta")
    return method


def _set(training: dict[str, Any], knob: str, value: Any, name: str) -> None:
    if training.get(knob, value) != value:
        raise InvalidRequest(
            f"{name} ({value}) and training.{knob} ({training[knob]}) say two different things; give one", param=name
        )
    training[knob] = value


def _has_adapter(own: Mapping[str, Any]) -> bool:
    return own.get("adapter") is not None or own.get("training", {}).get("lora") is not None


def _logger(number: int, item: Integration) -> dict[str, Any]:
    if item.type != "wandb" or item.wandb is None:
        raise InvalidRequest(
            f"integrations.{number}.type {item.type!r} is not supported; give wandb with its options",
            code="unsupported_integration",
            param=f"integrations.{number}",
        )
    options = item.wandb.model_dump(mode="json", exclude_none=True, include=set(Wandb.model_fields))
    logger = {"kind": "wandb", "mode": "online", **options}
    try:
        _LOGGER.validate_python(logger)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(str(part) for part in fault["loc"] if part != "wandb") or "type"
        raise InvalidRequest(
            f"integrations.{number}.wandb: this server cannot honour {name}: {fault['msg']}",
            code="unsupported_integration",
            param=f"integrations.{number}.wandb.{name}",
        ) from error
    return logger


def _job_request(made: Mapping[str, Any]) -> JobRequest:
    try:
        return JobRequest.model_validate(made)
    except ValidationError as error:
        faults = field_errors(error.errors(include_url=False), dict(made), _openai_name)
        raise InvalidRequest(summary(faults), param=faults[0]["loc"] or None, errors=faults) from error


_NAMES = {"dataset": "training_file", "validation_dataset": "validation_file", "name": "suffix", "loggers": "integrations"}


def _openai_name(path: str) -> str:
    """The field of OpenAI's request that one of ours was made from."""
    name, dot, rest = path.partition(".")
    return _NAMES.get(name, name) + dot + rest


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
