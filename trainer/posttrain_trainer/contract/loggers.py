"""Where metrics go besides the run's own file, one model for each `kind`.

Nothing here holds a secret or an address: keys and servers come from the environment of whoever runs the trainer
(`WANDB_API_KEY`, `WANDB_BASE_URL`, `MLFLOW_TRACKING_URI`, ...), so no request can name them and no record shows them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain_trainer.contract.methods import Arguments

_Name = Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f/\\:%\"']+$")]


class JsonlLogger(Arguments):
    """The metrics file of the run, always written; may be named for clarity."""

    kind: Literal["jsonl"] = "jsonl"
    """metrics.jsonl in the attempt's folder."""


class TensorboardLogger(Arguments):
    """TensorBoard event files."""

    kind: Literal["tensorboard"]
    """TensorBoard."""


class WandbLogger(Arguments):
    """Weights & Biases; the key is taken from WANDB_API_KEY alone."""

    kind: Literal["wandb"]
    """Weights & Biases."""
    project: _Name = "posttrain"
    """Project that the run belongs to."""
    name: _Name | None = None
    """The run's name; None = Weights & Biases makes one."""
    mode: Literal["offline", "online"] = "offline"
    """offline: files in the attempt's folder, to be sent later by `wandb sync`. online: sent while training."""


class MlflowLogger(Arguments):
    """MLflow; the store is MLFLOW_TRACKING_URI, or mlflow.db in the run's folder."""

    kind: Literal["mlflow"]
    """MLflow."""
    experiment: _Name = "posttrain"
    """Experiment that the run belongs to; made when missing."""
    name: _Name | None = None
    """The run's name; None = MLflow makes one."""


Logger = Annotated[JsonlLogger | TensorboardLogger | WandbLogger | MlflowLogger, Field(discriminator="kind")]
"""The union of loggers, told apart by `kind`."""
