"""Response shapes as they stand in openapi.yaml. Answers are made by `views`, and a test holds them against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from posttrain_service.domain.lifecycle import EndReason, JobState
from posttrain_trainer.contract.events import MetricsPoint as PointRecord


class Shape(BaseModel):
    """Base of response shapes."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")


class ErrorItem(Shape):
    """One fault of several."""

    model_config = ConfigDict(extra="allow")

    message: str
    """What is wrong."""
    line: int | None = None
    """Line of the data set, from 1."""
    loc: str | None = None
    """Field, as a dotted path."""


class ErrorDetail(Shape):
    """What went wrong."""

    message: str
    """What is wrong with which value, and what to do."""
    type: str
    """Coarse kind, as OpenAI-shaped clients know it."""
    param: str | None
    """Field at fault."""
    code: str
    """Stable name of the error."""
    errors: list[ErrorItem] = []
    """Every single fault, where there are several."""
    request_id: str | None = None
    """The id under which the server's log has the request; the header X-Request-Id has it too."""


class Error(Shape):
    """The body of every error."""

    error: ErrorDetail
    """What went wrong."""
    detail: str
    """The message again."""


class Progress(Shape):
    """How far a job is."""

    model_config = ConfigDict(extra="allow")

    step: int | None = None
    """Optimizer steps done."""
    total_steps: int | None = None
    """Optimizer steps planned."""
    epoch: float | None = None
    """Epochs done."""
    percent: float | None = None
    """Share of the steps done, 0 to 100."""
    eta_s: float | None = None
    """Estimated seconds to the end."""
    samples_seen: int | None = None
    """Samples seen."""
    tokens_seen: int | None = None
    """Tokens seen."""
    tokens_per_s: float | None = None
    """Speed."""
    phase: str | None = None
    """What the trainer is doing."""
    time: str | None = None
    """When it said so."""


class Tracker(Shape):
    """Where another program shows a job."""

    kind: str
    """wandb or mlflow."""
    url: str
    """Address of the page."""


class JobError(Shape):
    """Why a job failed."""

    code: str | None
    """Stable name of the error."""
    message: str | None
    """What went wrong."""
    rank: int | None
    """Rank that failed first."""
    log_tail: str | None
    """Last lines of that rank's log."""
    errors: list[ErrorItem] = []
    """Bad lines of the data set."""


class CheckpointFile(Shape):
    """One file of a checkpoint."""

    path: str
    """Path below the checkpoint, as the files route takes it."""
    size_bytes: int
    """Its size."""
    sha256: str
    """Its SHA-256, in hex."""


class Checkpoint(Shape):
    """A complete checkpoint."""

    model_config = ConfigDict(extra="allow")

    id: str
    """step-000100."""
    step: int
    """Optimizer steps done."""
    epoch: float
    """Epochs done."""
    created_at: str
    """When it was complete."""
    size_bytes: int
    """Size on the server, optimizer state included."""
    files: list[CheckpointFile]
    """Files that can be downloaded."""
    metrics: dict[str, float | None]
    """Newest metrics at that step."""
    kind: Literal["full", "adapter"]
    """A whole model, or a PEFT adapter."""
    best: bool
    """Whether it is the best one by the job's best_metric."""


_point_fields: dict[str, Any] = {
    name: (info.annotation, info) for name, info in PointRecord.model_fields.items() if name not in ("v", "time")
}
MetricsPoint = create_model(
    "MetricsPoint", __base__=Shape, __doc__="One optimizer step.", time=(str | None, Field(None, description="When the step ended.")), **_point_fields
)


class Job(Shape):
    """A job."""

    job_uuid: str
    """Its id."""
    name: str | None
    """Its name for people."""
    status: JobState
    """Where it is in its life."""
    reason: EndReason | None
    """Why it ended or stopped."""
    error: JobError | None
    """What went wrong."""
    warnings: list[str]
    """What whoever asked should know."""
    method: str
    """Kind of training."""
    model: str
    """Base model."""
    priority: int
    """Place in the queue."""
    created_at: str
    """When it was accepted."""
    scheduled_at: str | None
    """When its attempt was started."""
    started_at: str | None
    """When its processes were confirmed."""
    completed_at: str | None
    """When it ended."""
    expires_at: str | None
    """When it will be removed."""
    deadline_at: str | None
    """When its present state's time is over."""
    attempt: int
    """Number of the newest attempt."""
    progress: Progress | None
    """How far it is."""
    metrics: dict[str, Any] | None
    """The newest metrics point."""
    resources_allocated: dict[str, Any] | None
    """What it uses now."""
    checkpoints: list[Checkpoint]
    """Its complete checkpoints."""
    fine_tuned_model: str | None
    """Name of its result, which a further job may train: ft:..."""
    queue_position: int | None
    """1 = next."""
    trackers: list[Tracker]
    """Pages of its newest attempt in Weights & Biases or MLflow, where they run on a server."""
    metadata: dict[str, str]
    """The client's own notes."""
    spec: dict[str, Any]
    """The request as it was resolved."""


class Plan(Shape):
    """What a dry run says."""

    spec: dict[str, Any]
    """The request with every default filled in."""
    argv: list[str]
    """The command that would start the ranks."""
    env: list[str]
    """Names of the environment variables that would be set."""
    devices: list[str]
    """Devices that the job would get."""
    dataset: dict[str, Any] | None
    """What a look at the rows found."""
    memory: dict[str, Any] | None
    """per_rank_bytes, total_bytes, fits; null when it could not be estimated."""
    parameters: int | None
    """Parameters of the model."""
    trainable_parameters: int | None
    """Those that would be trained."""
    steps: int | None
    """Optimizer steps."""
    tokens: int | None
    """Tokens that would be trained on."""
    packing: dict[str, Any] | None
    """How full micro-batches of `max_batch_len` tokens are, from 0 to 1: `efficiency` when packed, `padded_efficiency` when padded."""
    warnings: list[str]
    """What whoever asks should know."""


class Event(Shape):
    """Something that happened to a job."""

    id: str
    """Its cursor."""
    created_at: str
    """When."""
    type: str
    """What kind."""
    level: Literal["info", "warn", "error"]
    """How much it matters."""
    message: str
    """One sentence."""
    data: dict[str, Any]
    """The same for programs."""


class LogPiece(Shape):
    """A piece of a log, in bytes of its file."""

    text: str
    """Its text; bytes that are not UTF-8 are replaced."""
    attempt: int
    """Attempt that wrote it."""
    source: str
    """torchrun, rank-0, ..."""
    offset: int
    """First byte."""
    next_offset: int
    """Byte after the last one."""
    size_bytes: int
    """Size of the file now."""
    sources: dict[str, list[str]]
    """Logs that exist, by attempt."""


class Health(Shape):
    """How the service is."""

    model_config = ConfigDict(extra="allow")

    status: str
    """ok, or what it is not."""


class Version(Shape):
    """Versions."""

    model_config = ConfigDict(extra="allow")

    version: str
    """Of the service."""
    contract: int
    """Of the contract with the trainer."""
    python: str
    """Of the service's interpreter."""
    trainer: dict[str, Any] | None
    """Of the trainer and its libraries."""


class Listing(Shape):
    """Base of all lists."""

    has_more: bool
    """Whether another page follows."""
    first_id: str | None
    """Cursor for the page before."""
    last_id: str | None
    """Cursor for the page after."""


class JobList(Listing):
    """Jobs."""

    data: list[Job]
    """Newest first."""


class EventList(Listing):
    """Events."""

    data: list[Event]
    """Oldest first, unless told."""


class MetricsList(Listing):
    """Metrics points."""

    data: list[MetricsPoint]
    """By step."""


class CheckpointList(Listing):
    """Checkpoints."""

    data: list[Checkpoint]
    """By step."""


METADATA_PARAMETER: dict[str, Any] = {
    "name": "metadata",
    "in": "query",
    "style": "deepObject",
    "explode": True,
    "description": "metadata[key]=value: only jobs with these pairs.",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}
"""OpenAPI's way to say `metadata[key]=value`."""
