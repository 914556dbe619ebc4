"""The records that a run writes and others read, each with its schema version.

One metrics point is one line of `metrics.jsonl`; one event is one line of `events.jsonl`; heartbeat, result and the
checkpoint manifest are whole files. Times are seconds since the epoch, UTC.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["import", "load", "data", "compile", "train", "validate", "save"]
StopWant = Literal["cancel", "pause"]


class Record(BaseModel):
    """Base of all records: frozen; readers keep going when a newer writer adds keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    v: int = 1
    """Schema version of the record."""


class MetricsPoint(Record):
    """What one optimizer step (or one validation) was like. Absent values are left out of the line."""

    attempt: int
    """Number of the attempt that made the step; of points for the same step the newest attempt's counts."""
    step: int
    """Optimizer steps done so far, from 1."""
    epoch: float
    """Epochs done so far: samples seen divided by samples in an epoch."""
    time: float
    """When the step ended."""
    loss: float | None = None
    """Mean loss over the supervised tokens (dpo: pairs) of the global batch; None when it was not finite."""
    learning_rate: float | None = None
    """Learning rate that the step used."""
    grad_norm: float | None = None
    """Global gradient norm before clipping; None when it was not finite."""
    tokens: int | None = None
    """Tokens of the global batch, padding not counted."""
    supervised_tokens: int | None = None
    """Tokens of the global batch that carried a label."""
    samples: int | None = None
    """Samples of the global batch."""
    tokens_per_s: float | None = None
    """Tokens divided by the step's wall time, over all ranks."""
    step_time_s: float | None = None
    """Wall time of the step, checkpoints and validation not counted."""
    data_time_s: float | None = None
    """Part of the step spent waiting for batches."""
    forward_time_s: float | None = None
    """Part of the step spent in forward passes."""
    backward_time_s: float | None = None
    """Part of the step spent in backward passes."""
    optimizer_time_s: float | None = None
    """Part of the step spent in clipping and the optimizer."""
    mfu: float | None = None
    """Model FLOPs utilisation, an estimate: 6 FLOPs a parameter and token, as a share of the ranks' matmul peak."""
    memory_bytes: int | None = None
    """Peak memory of rank 0 so far: device memory on accelerators, resident memory on CPU."""
    skipped: bool | None = None
    """True when loss or gradients were not finite and the step was not applied."""
    accuracy: float | None = None
    """Share of supervised tokens that were the model's first guess; dpo: of pairs whose chosen answer has the higher reward."""
    rewards_chosen: float | None = None
    """dpo: mean reward of the chosen answers, beta times the log-ratio to the reference."""
    rewards_rejected: float | None = None
    """dpo: mean reward of the rejected answers."""
    rewards_margin: float | None = None
    """dpo: mean difference of the two."""
    validation_loss: float | None = None
    """Mean loss over the validation set after this step."""
    validation_perplexity: float | None = None
    """exp(validation_loss)."""
    validation_accuracy: float | None = None
    """The same as accuracy, over the validation set."""


class RunEvent(Record):
    """Something worth telling: a phase began, a checkpoint is complete, a warning."""

    time: float
    """When it happened."""
    attempt: int
    """Number of the attempt."""
    type: Literal["phase", "data", "epoch", "validation", "checkpoint", "resume", "tracker", "warning", "ended"]
    """What kind of event it is."""
    level: Literal["info", "warn", "error"] = "info"
    """How much it matters."""
    message: str
    """One sentence for people."""
    data: dict[str, Any] = Field(default_factory=dict)
    """The same as values for programs."""


class Tracker(BaseModel):
    """Where another program shows the run."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    kind: str
    """Of the logger: wandb or mlflow."""
    url: str
    """Address of the run's page."""


class Heartbeat(Record):
    """The newest sign of progress of rank 0."""

    time: float
    """When it was written."""
    monotonic: float | None = None
    """When it was written by the host's monotonic clock, which nobody sets; means something on the same boot only."""
    phase: Phase
    """What the trainer is doing; each phase has its own deadline in the service."""
    step: int = 0
    """Optimizer steps done."""
    total_steps: int | None = None
    """Optimizer steps planned; None before the data is known."""
    epoch: float = 0.0
    """Epochs done."""
    samples_seen: int = 0
    """Samples seen since the run began, over all attempts."""
    tokens_seen: int = 0
    """Tokens seen since the run began, over all attempts."""
    tokens_per_s: float | None = None
    """Mean speed of the last steps."""
    trackers: list[Tracker] = []
    """Pages of this attempt in trackers that have some."""
    eta_s: float | None = None
    """Estimated seconds to the last step."""


class RunResult(Record):
    """How a run that ended in order ended: what `train_torchrun` returns."""

    status: Literal["completed", "stopped"]
    """completed: every planned step is done. stopped: a stop request was obeyed."""
    want: StopWant | None = None
    """For stopped: what was asked for."""
    steps: int
    """Optimizer steps done over all attempts."""
    total_steps: int
    """Optimizer steps planned."""
    epochs: float
    """Epochs done."""
    samples_seen: int
    """Samples seen over all attempts."""
    tokens_seen: int
    """Tokens seen over all attempts."""
    skipped_steps: int = 0
    """Steps whose loss or gradients were not finite."""
    loss: float | None = None
    """Loss of the last step."""
    checkpoint: str | None = None
    """Id of the newest complete checkpoint, e.g. step-000100; its `model/` folder is what people load."""
    checkpoint_path: str | None = None
    """Absolute path of that checkpoint."""
    train_time_s: float
    """Wall time of this attempt's training loop."""
    startup_s: dict[str, float] = Field(default_factory=dict)
    """Seconds of each part of this attempt's start: import, load, data, first_step."""
    dataset: dict[str, Any] = Field(default_factory=dict)
    """Counts of the data set: rows, tokens, supervised_tokens, dropped, truncated and why."""
    warnings: list[str] = Field(default_factory=list)
    """Everything the person who asked should know."""


class ManifestFile(Record):
    """One file of a checkpoint."""

    path: str
    """Path inside the checkpoint's folder, with forward slashes."""
    size_bytes: int
    """Its size."""
    sha256: str
    """Its SHA-256, in hex."""


class Manifest(Record):
    """A checkpoint's table of contents; the checkpoint exists when this file does."""

    id: str
    """step-000100."""
    step: int
    """Optimizer steps done."""
    epoch: float
    """Epochs done."""
    samples_seen: int
    """Samples seen."""
    tokens_seen: int = 0
    """Tokens seen."""
    attempt: int
    """Attempt that wrote it."""
    created_at: float
    """When it became complete."""
    kind: Literal["full", "adapter"]
    """What `model/` holds: a whole model, or a PEFT adapter."""
    trigger: Literal["steps", "samples", "epoch", "end", "stop"]
    """Why it was made."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Newest training and validation metrics at that step."""
    arguments_digest: str
    """SHA-256 over the arguments that a resumed run must share."""
    files: list[ManifestFile]
    """All files of the checkpoint but the manifest itself."""
