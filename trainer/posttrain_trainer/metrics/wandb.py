"""Weights & Biases, an optional sink; the package is imported on use, its key comes from the environment alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.events import MetricsPoint
from posttrain_trainer.contract.loggers import WandbLogger
from posttrain_trainer.metrics.sink import End, numbers

_EXIT_CODES: dict[End, int] = {"completed": 0, "stopped": 255, "failed": 1}
"""What W&B makes the run's state of; 255 is what it takes for an interrupted process itself."""


class WandbSink:
    """Writes every number of a point, at its step, to one run of Weights & Biases.

    Args:
        logger: Project, name and mode.
        folder: Where its files go; made when missing.
        config: Shown beside the run: its arguments.

    Raises:
        InvalidArguments: The wandb package is not installed.
    """

    name = "wandb"

    def __init__(self, logger: WandbLogger, folder: Path, config: dict[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own crash reports go to its makers
        try:
            import wandb
        except ImportError as error:
            raise InvalidArguments("loggers names wandb, which is not installed here; install posttrain[tracking] or leave it out") from error
        folder.mkdir(parents=True, exist_ok=True)
        # No source code, terminal output or machine statistics: only what a point holds leaves the run.
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, x_disable_meta=True
        )
        self._run: Any = wandb.init(
            project=logger.project, name=logger.name, mode=logger.mode, dir=str(folder), config=config, settings=settings
        )
        self.url: str | None = self._run.url  # none offline
        # A resumed run begins at a later step, and a validation shares the step of the training step before it.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, point: MetricsPoint) -> None:
        """Add the point's numbers at its step."""
        self._run.log({"step": point.step, "time": point.time, **numbers(point)})

    def close(self, end: End = "completed") -> None:
        """Write out what is buffered and end the run, in the state that it ended in."""
        self._run.finish(exit_code=_EXIT_CODES[end])
