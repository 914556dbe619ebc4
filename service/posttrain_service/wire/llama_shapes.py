"""Response shapes of llama-stack's routes, as they stand in openapi.yaml."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from posttrain_service.wire.shapes import JobError, Progress, Shape

Status = Literal["completed", "in_progress", "failed", "scheduled", "cancelled"]


class PostTrainingJob(Shape):
    """llama-stack's PostTrainingJob, with its state."""

    job_uuid: str
    """Its id."""
    status: Status
    """Its state, as llama-stack calls it."""


class PostTrainingJobList(Shape):
    """All jobs."""

    data: list[PostTrainingJob]
    """Newest first."""


class PostTrainingMetric(Shape):
    """What a checkpoint was worth."""

    epoch: int
    """Whole epochs done."""
    train_loss: float | None
    """Mean loss of the last steps before it."""
    validation_loss: float | None
    """Mean loss on the validation rows; null without any."""
    perplexity: float | None
    """e to the validation loss; null without validation rows."""


class LlamaCheckpoint(Shape):
    """llama-stack's Checkpoint."""

    identifier: str
    """Name of the model that it is, to start a further job from."""
    created_at: str
    """When it was complete."""
    epoch: int
    """Whole epochs done."""
    post_training_job_id: str
    """The job that made it."""
    path: str
    """Folder that people load: on the server where it listens on loopback only, else below its storage directory."""
    training_metrics: PostTrainingMetric | None
    """What it was worth; null when nothing was measured."""


class PostTrainingJobArtifacts(Shape):
    """What a job has made."""

    job_uuid: str
    """Its id."""
    checkpoints: list[LlamaCheckpoint]
    """Complete checkpoints, lowest step first."""


class PostTrainingJobStatus(PostTrainingJobArtifacts):
    """llama-stack's status of a job, and what posttrain knows besides."""

    status: Status
    """Its state, as llama-stack calls it."""
    scheduled_at: str | None
    """When it was accepted."""
    started_at: str | None
    """When its processes were seen to run."""
    completed_at: str | None
    """When it ended."""
    resources_allocated: dict[str, Any] | None
    """What it uses while it runs."""
    error: JobError | None
    """Why it failed."""
    progress: Progress | None
    """How far it is."""
    warnings: list[str]
    """What the one who asked should know."""


class Dataset(Shape):
    """llama-stack's Dataset."""

    model_config = ConfigDict(extra="allow")

    type: Literal["dataset"]
    """dataset."""
    identifier: str
    """Its name."""
    provider_resource_id: str
    """Id of the file that holds its rows."""
    provider_id: str
    """posttrain."""
    purpose: str
    """What its owner says it is for."""
    source: dict[str, Any]
    """Where its rows came from; rows that came with the request are read by iterrows."""
    metadata: dict[str, Any]
    """Its owner's notes."""


class DatasetList(Shape):
    """All data sets."""

    data: list[Dataset]
    """Oldest first."""


class IterrowsPage(Shape):
    """A piece of a data set."""

    data: list[dict[str, Any]]
    """Its rows."""
    has_more: bool
    """Whether rows follow."""
    url: str | None
    """Always null."""
