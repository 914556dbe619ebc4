"""`JobRequest`: what a client may ask for when it creates a job, and how it becomes the trainer's arguments."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, field_validator, model_validator

from posttrain_service.domain.lifecycle import REASON_STATE, EndReason, JobState
from posttrain_service.domain.webhooks import url_fault
from posttrain_service.wire.base import JOB_ID, NAME, Name, Wire
from posttrain_service.wire.knobs import TorchrunKnobs, TrainingKnobs
from posttrain_service.wire.names import CHECKPOINT_NAMES, OWN_PATHS, disagreement, path_of
from posttrain_trainer.contract.base import Disagreement
from posttrain_trainer.contract.loggers import Logger
from posttrain_trainer.contract.methods import Method, SftMethod
from posttrain_trainer.contract.spec import FullTrainingArguments, LoraArguments, TorchrunArguments

_PLAIN = r"^[^\x00]*$"

Devices = int | Literal["auto"] | tuple[str, ...]
"""A number of devices, `auto` (all that are free and of use), or named ones."""


class InlineRows(Wire):
    """Rows handed in with the request itself."""

    rows: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    """Training rows in any of the row formats."""

    @field_validator("rows")
    @classmethod
    def _writable(cls, rows: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for number, row in enumerate(rows, 1):
            try:
                json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8")
            except ValueError as error:  # NaN, infinities, lone surrogates: not JSON in UTF-8
                raise ValueError(f"row {number} cannot be written as JSON in UTF-8: {error}") from error
        return rows


DatasetRef = Name | InlineRows


class LoraAdapter(LoraArguments):
    """Train a LoRA adapter instead of all weights."""

    kind: Literal["lora"] = "lora"
    """LoRA, with its variants DoRA and rsLoRA."""


class Resources(Wire):
    """What the job may use."""

    devices: (
        Annotated[int, Field(ge=1, le=1024)]
        | Literal["auto"]
        | Annotated[
            tuple[int | Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,100}$")], ...],
            Field(min_length=1, max_length=1024),
        ]
        | None
    ) = None
    """Number of devices (one rank each), `auto`, or the devices by number or name; None = torchrun.nproc_per_node, else 1."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Higher ones leave the queue first; among equals the older one does."""
    max_duration_s: Annotated[FiniteFloat, Field(gt=0, le=10 * 365 * 86400)] | None = None
    """The job is stopped when it has run this long; None = no limit."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if isinstance(self.devices, tuple) and len({str(device) for device in self.devices}) < len(self.devices):
            raise Disagreement("{devices} names a device twice: {given}", given=list(self.devices))
        return self


class CheckpointRules(Wire):
    """When checkpoints are made and which stay."""

    every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    """Save every so many optimizer steps; 0 = not by steps."""
    every_epoch: bool | None = None
    """Save at the end of each epoch."""
    keep_last: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Newest checkpoints that stay."""
    keep_best: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    """Best checkpoints that stay besides."""
    metric: Literal["validation_loss", "validation_accuracy", "loss"] | None = None
    """What makes a checkpoint the best."""


class Retention(Wire):
    """How long the ended job and its files stay."""

    ttl_s: Annotated[int, Field(ge=1, le=100 * 365 * 86400)] | None = None
    """Seconds from the job's end to its removal; None = the server's default."""
    keep: bool = False
    """Never removed by the server."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.keep and self.ttl_s is not None:
            raise Disagreement("{ttl_s} ({given}) and {keep} exclude each other; give one", given=self.ttl_s)
        return self


class Retry(Wire):
    """When a failed attempt is followed by another one without being asked."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 1
    """Attempts in all; 1 = never again by itself."""
    on: tuple[EndReason, ...] = ()
    """Reasons of failure that are tried again; empty = those whose cause lies outside the job."""

    @model_validator(mode="after")
    def _failures(self) -> Self:
        for reason in self.on:
            if REASON_STATE[reason] is not JobState.FAILED:
                raise Disagreement("{on} names {reason}, which is not a failure", reason=repr(str(reason)))
        if self.on and self.max_attempts == 1:
            raise Disagreement("{on} has no effect with {max_attempts} 1; raise {max_attempts} or leave {on} out")
        return self


class JobRequest(Wire):
    """A training job."""

    job_uuid: Annotated[str, Field(pattern=JOB_ID)] | None = None
    """The job's id, chosen by the client; None = the server makes a UUID. The same id with the same body is the same job."""
    name: Name | None = None
    """A name for people; need not be unique."""
    method: Method = SftMethod()
    """What is learned from the rows."""
    model: Annotated[str, Field(min_length=1, max_length=600, pattern=NAME)]
    """Name of a model on the server, an id on the Hugging Face hub, or what another job made: `ft:...`."""
    dataset: DatasetRef
    """Id of an uploaded file, or the rows themselves."""
    validation_dataset: DatasetRef | None = None
    """Rows to validate on: the id of an uploaded file, or the rows themselves."""
    validation_split: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    """Share of the training rows held out for validation; not together with validation_dataset."""
    adapter: LoraAdapter | None = None
    """Train an adapter; None = what training.lora says, else full fine-tuning."""
    training: TrainingKnobs = TrainingKnobs()
    """Every knob of the trainer but the paths."""
    torchrun: TorchrunKnobs = TorchrunKnobs()
    """How torchrun starts the ranks."""
    resources: Resources = Resources()
    """What the job may use."""
    checkpoints: CheckpointRules = CheckpointRules()
    """When checkpoints are made and which stay."""
    loggers: tuple[Logger, ...] | None = None
    """Where metrics go besides the job's own."""
    retention: Retention = Retention()
    """How long the ended job stays."""
    retry: Retry | None = None
    """When a failed attempt is followed by another one; None = never by itself."""
    webhook_url: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    """Where the job's end is told by a POST; see docs/lifecycle.md for its form and signature."""
    metadata: Annotated[
        dict[
            Annotated[str, Field(min_length=1, max_length=64, pattern=_PLAIN)],
            Annotated[str, Field(max_length=512, pattern=_PLAIN)],
        ],
        Field(max_length=16, default_factory=dict),
    ]
    """At most 16 notes of the client's own, to find the job by."""

    @field_validator("webhook_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and (fault := url_fault(url)) is not None:
            raise ValueError(f"webhook_url is no address to post to: {fault}")
        return url

    @model_validator(mode="after")
    def _agree(self) -> Self:
        _refuse_second_values(self)
        _refuse_many_hosts(self)
        if self.training_knob("resume").startswith("step-"):
            raise Disagreement(
                "{training.resume} is {given}, but a new job has no checkpoints; use auto or never",
                given=repr(self.training_knob("resume")),
            )
        try:
            self.train_args(
                model_path=self.model,
                data_path="data",
                ckpt_output_dir="run",
                validation_data_path=None if self.validation_dataset is None else "validation",
            )
        except ValidationError as error:
            raise disagreement(error, self.field_of) or error from error
        return self

    def field_of(self, argument: str) -> str:
        """The field of this request that an argument of the trainer came from, or could come from."""
        return path_of(argument, own=self._own_names(), training=self.training.model_fields_set)

    def training_knob(self, name: str) -> Any:
        """The value of one knob of `training`, as given or by default."""
        return getattr(self.training, name)

    @property
    def asked_method(self) -> Method:
        """The method, by its own name or as training.method."""
        found: Method = self._knob("method")
        return found

    def _knob(self, name: str) -> Any:
        return self._own_names().get(name, self.training_knob(name))

    def _own_names(self) -> dict[str, Any]:
        """Trainer arguments that the request says by a name of its own."""
        own: dict[str, Any] = {}
        if "method" in self.model_fields_set:
            own["method"] = self.method
        if self.validation_split is not None:
            own["validation_split"] = self.validation_split
        if self.adapter is not None:
            own["lora"] = LoraArguments(**self.adapter.model_dump(exclude={"kind"}))
        if self.loggers is not None:
            own["loggers"] = self.loggers
        own |= {
            to: value
            for name, to in CHECKPOINT_NAMES.items()
            if (value := getattr(self.checkpoints, name)) is not None
        }
        return own

    @property
    def devices(self) -> Devices:
        """The devices asked for: by resources.devices, else by torchrun.nproc_per_node, else one."""
        asked = self.resources.devices
        if asked is None:
            nproc = self.torchrun.nproc_per_node
            return "auto" if nproc == "auto" else int(nproc)
        return tuple(str(device) for device in asked) if isinstance(asked, tuple) else asked

    def train_args(
        self,
        *,
        model_path: str,
        data_path: str,
        ckpt_output_dir: str,
        validation_data_path: str | None = None,
        data_output_dir: str | None = None,
    ) -> FullTrainingArguments:
        """The trainer's arguments for this request, with the paths that the service decided.

        Raises:
            pydantic.ValidationError: The knobs contradict each other; a request that was accepted never does.
        """
        knobs = {name: getattr(self.training, name) for name in self.training.model_fields_set} | self._own_names()
        return FullTrainingArguments(
            **knobs,
            model_path=model_path,
            data_path=data_path,
            ckpt_output_dir=ckpt_output_dir,
            validation_data_path=validation_data_path,
            data_output_dir=data_output_dir,
        )

    def torch_args(self, nproc_per_node: int) -> TorchrunArguments:
        """Torchrun's arguments for this request on `nproc_per_node` devices of one host."""
        knobs = {name: getattr(self.torchrun, name) for name in self.torchrun.model_fields_set}
        return TorchrunArguments(**knobs | {"nproc_per_node": nproc_per_node})

    def digest(self) -> str:
        """SHA-256 over the meaning of the request: two bodies with the same digest ask for the same job."""
        return hashlib.sha256(json.dumps(_meaning(self), sort_keys=True).encode()).hexdigest()


def _meaning(value: Any) -> Any:
    """What was asked for: a default that was spelt out counts as left out, so a new field changes no older digest."""
    if isinstance(value, BaseModel):
        fields = {name: (getattr(value, name), info) for name, info in type(value).model_fields.items()}
        return {
            name: _meaning(found)
            for name, (found, info) in fields.items()
            if name == "kind" or found != info.get_default(call_default_factory=True)
        }
    return [_meaning(item) for item in value] if isinstance(value, tuple) else value


def _refuse_second_values(request: JobRequest) -> None:
    for name, value in request._own_names().items():
        if name in request.training.model_fields_set and request.training_knob(name) != value:
            raise Disagreement(
                f"{{{OWN_PATHS[name]}}} and {{training.{name}}} say two different things ({{one}} and {{other}}); give one",
                one=_short(value),
                other=_short(request.training_knob(name)),
            )
    asked, nproc = request.resources.devices, request.torchrun.nproc_per_node
    if asked is not None and "nproc_per_node" in request.torchrun.model_fields_set:
        count = len(asked) if isinstance(asked, tuple) else asked
        if count != nproc:
            raise Disagreement(
                "{resources.devices} ({one}) and {torchrun.nproc_per_node} ({other}) say two different things; give one",
                one=_short(asked),
                other=nproc,
            )


def _refuse_many_hosts(request: JobRequest) -> None:
    defaults = TorchrunArguments()
    for name in ("nnodes", "node_rank", "rdzv_id", "rdzv_endpoint", "master_addr", "master_port"):
        value = getattr(request.torchrun, name)
        if value != getattr(defaults, name):
            raise Disagreement(
                f"{{torchrun.{name}}} ({{given}}) is for training over several hosts, and this server trains on one; leave it out",
                given=repr(value),
            )
    if request.torchrun.nproc_per_node in ("gpu", "cpu"):
        raise Disagreement(
            "{torchrun.nproc_per_node} is {given}: give a number or 'auto', and {training.device} where the kind matters",
            given=repr(request.torchrun.nproc_per_node),
        )


def _short(value: Any) -> str:
    text = value.model_dump_json() if hasattr(value, "model_dump_json") else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
