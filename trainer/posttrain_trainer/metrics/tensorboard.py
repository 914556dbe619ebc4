"""TensorBoard event files, an optional sink; the package is imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.events import MetricsPoint
from posttrain_trainer.metrics.sink import End, numbers


class TensorboardSink:
    """Writes every number of a point as a scalar named like its field.

    Args:
        folder: Where event files go; made when missing.

    Raises:
        InvalidArguments: The tensorboard package is not installed.
    """

    name = "tensorboard"
    url = None

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidArguments(
                "loggers names tensorboard, which is not installed here; install posttrain[tracking] or leave it out"
            ) from error
        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def write(self, point: MetricsPoint) -> None:
        """Add the point's numbers at its step."""
        for name, value in numbers(point).items():
            self._writer.add_scalar(name, value, global_step=point.step, walltime=point.time)
        self._writer.flush()

    def close(self, end: End = "completed") -> None:
        """Write out what is buffered and close the file."""
        self._writer.close()
