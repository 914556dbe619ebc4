"""Response shapes of /v1/fine_tuning and /v1/uploads as they stand in openapi.yaml, and the requests of uploads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain_service.wire.base import Lenient
from posttrain_service.wire.file_shapes import File
from posttrain_service.wire.shapes import Listing, Shape


class FineTuningError(Shape):
    """Why a job failed."""

    code: str | None
    """Stable name of the reason."""
    message: str | None
    """What was wrong; for bad rows with their lines."""
    param: str | None
    """The field at fault: training_file or validation_file."""


class FineTuningJob(Shape):
    """OpenAI's FineTuningJob object, with the warnings beside it."""

    id: str
    """The job's id, the same in every API of this server."""
    object: Literal["fine_tuning.job"]
    """fine_tuning.job."""
    created_at: int
    """Unix seconds."""
    error: FineTuningError | None
    """Why it failed."""
    fine_tuned_model: str | None
    """Name of the result, once it succeeded: a further job's `model`."""
    finished_at: int | None
    """Unix seconds."""
    hyperparameters: dict[str, Any]
    """n_epochs, batch_size, learning_rate_multiplier; auto while the rows have not been read."""
    model: str
    """What it started from."""
    organization_id: str
    """posttrain."""
    result_files: list[str]
    """Ids of files with its metrics as CSV, once it ended."""
    seed: int
    """Seed."""
    status: Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
    """Where it is."""
    trained_tokens: int | None
    """Tokens seen, once it ended."""
    training_file: str
    """Id of the file; inline where the rows came with the request."""
    validation_file: str | None
    """Id of the file."""
    estimated_finish: int | None
    """Unix seconds."""
    integrations: list[dict[str, Any]]
    """Where metrics go besides."""
    metadata: dict[str, str] | None
    """The client's notes."""
    method: dict[str, Any]
    """Type and hyperparameters."""
    warnings: list[str]
    """What the person who asked should know."""


class FineTuningJobList(Listing):
    """Jobs."""

    object: Literal["list"]
    """list."""
    data: list[FineTuningJob]
    """Newest first."""


class FineTuningEvent(Shape):
    """Something that happened, or the metrics of a step."""

    id: str
    """ftevent-..."""
    object: Literal["fine_tuning.job.event"]
    """fine_tuning.job.event."""
    created_at: int
    """Unix seconds."""
    level: Literal["info", "warn", "error"]
    """How much it matters."""
    message: str
    """One sentence."""
    type: Literal["message", "metrics"]
    """What kind it is."""
    data: dict[str, Any]
    """metrics: step, total_steps, train_loss, train_mean_token_accuracy, valid_loss, valid_mean_token_accuracy."""


class FineTuningEventList(Listing):
    """Events."""

    object: Literal["list"]
    """list."""
    data: list[FineTuningEvent]
    """Newest first."""


class FineTuningCheckpoint(Shape):
    """One checkpoint of a job."""

    id: str
    """ftckpt_..., the same in every answer."""
    object: Literal["fine_tuning.job.checkpoint"]
    """fine_tuning.job.checkpoint."""
    created_at: int
    """Unix seconds."""
    fine_tuning_job_id: str
    """The job."""
    fine_tuned_model_checkpoint: str
    """Its name: a further job's `model`."""
    step_number: int
    """Optimizer steps done."""
    metrics: dict[str, Any]
    """step, train_loss, train_mean_token_accuracy, valid_loss, valid_mean_token_accuracy, as far as measured."""


class FineTuningCheckpointList(Listing):
    """Checkpoints."""

    object: Literal["list"]
    """list."""
    data: list[FineTuningCheckpoint]
    """Highest step first."""


class UploadObject(Shape):
    """OpenAI's Upload object."""

    id: str
    """upload_..."""
    object: Literal["upload"]
    """upload."""
    bytes: int
    """Size of the whole file."""
    created_at: int
    """Unix seconds."""
    expires_at: int
    """Unix seconds; it must be complete by then."""
    filename: str
    """Its name at the sender."""
    purpose: str
    """What the file is for."""
    status: Literal["pending", "completed", "cancelled", "expired"]
    """Where it is."""
    file: File | None
    """The file, once completed."""


class UploadPart(Shape):
    """OpenAI's UploadPart object."""

    id: str
    """part_..."""
    object: Literal["upload.part"]
    """upload.part."""
    created_at: int
    """Unix seconds."""
    upload_id: str
    """The upload."""


class ExpiresAfter(Lenient):
    """When the file expires."""

    anchor: Literal["created_at"]
    """created_at."""
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]
    """Seconds after its creation."""


class CreateUpload(Lenient):
    """A file that will be handed in by parts."""

    bytes: Annotated[int, Field(ge=1, le=2**53)]
    """Size of the whole file."""
    filename: Annotated[str, Field(min_length=1, max_length=1000)]
    """Its name."""
    mime_type: Annotated[str, Field(max_length=255)]
    """Its type; what counts is the name's ending."""
    purpose: Annotated[str, Field(min_length=1, max_length=64)]
    """fine-tune."""
    expires_after: ExpiresAfter | None = None
    """When the file expires; None = kept until it is deleted."""


class CompleteUpload(Lenient):
    """Put the parts together."""

    part_ids: Annotated[tuple[str, ...], Field(min_length=1, max_length=100_000)]
    """Ids of the parts, in the file's order."""
    md5: Annotated[str, Field(min_length=32, max_length=32)] | None = None
    """MD5 of the whole file in hex; None = not checked."""


PART_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"type": "string", "format": "binary"}},
            }
        }
    },
}
"""The form of a part; read as it arrives."""
