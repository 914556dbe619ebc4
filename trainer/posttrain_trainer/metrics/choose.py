"""The sinks that a run's arguments name, opened; the run's own file always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain_trainer.contract.loggers import Logger, MlflowLogger, TensorboardLogger, WandbLogger
from posttrain_trainer.contract.rundir import AttemptDir
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.metrics.jsonl import JsonlSink
from posttrain_trainer.metrics.mlflow import MlflowSink
from posttrain_trainer.metrics.sink import MetricSink, open_sink
from posttrain_trainer.metrics.tensorboard import TensorboardSink
from posttrain_trainer.metrics.wandb import WandbSink


def open_sinks(args: FullTrainingArguments, attempt: AttemptDir, warn: Callable[[str], None]) -> list[MetricSink]:
    """Every sink once for each time that `args.loggers` names it, metrics.jsonl first.

    Args:
        args: Names the loggers, and is shown beside the run in those that show one.
        attempt: Files go into its folder; what lasts over attempts into the run's.
        warn: Called with a sentence for a sink that could not be opened.

    Raises:
        InvalidArguments: The package of one of them is not installed.
    """
    config = args.model_dump(mode="json")
    sinks: list[MetricSink] = [JsonlSink(attempt.metrics)]
    for logger in dict.fromkeys(args.loggers):
        make = _maker(logger, attempt, config)
        if make is not None and (sink := open_sink(logger.kind, make, warn)) is not None:
            sinks.append(sink)
    return sinks


def _maker(logger: Logger, attempt: AttemptDir, config: dict[str, Any]) -> Callable[[], MetricSink] | None:
    run_folder = attempt.path.parent.parent
    if isinstance(logger, TensorboardLogger):
        return lambda: TensorboardSink(attempt.path / "tensorboard")
    if isinstance(logger, WandbLogger):
        return lambda: WandbSink(logger, attempt.path, config)
    if isinstance(logger, MlflowLogger):
        return lambda: MlflowSink(logger, run_folder, config)
    return None
