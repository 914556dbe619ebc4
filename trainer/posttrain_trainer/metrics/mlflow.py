"""MLflow, an optional sink; the package is imported on use, the store comes from the environment or is the run's own file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.events import MetricsPoint
from posttrain_trainer.contract.loggers import MlflowLogger
from posttrain_trainer.metrics.sink import End, numbers

_LONGEST_VALUE = 500
_STATES: dict[End, str] = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowSink:
    """Writes every number of a point, at its step, to one run of MLflow.

    Args:
        logger: Experiment and name.
        folder: Holds mlflow.db where MLFLOW_TRACKING_URI names no store.
        config: The run's arguments, kept as its parameters.

    Raises:
        InvalidArguments: The mlflow package is not installed.
    """

    name = "mlflow"

    def __init__(self, logger: MlflowLogger, folder: Path, config: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise InvalidArguments("loggers names mlflow, which is not installed here; install posttrain[tracking] or leave it out") from error
        self._metric = Metric
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        # A client of its own: mlflow's global "active run" would be shared with whatever else uses it in this process.
        self._client: Any = MlflowClient(tracking_uri=store)
        found = self._client.get_experiment_by_name(logger.experiment)
        if found is not None:
            experiment = found.experiment_id
        else:
            experiment = self._client.create_experiment(logger.experiment, artifact_location=(folder / "mlflow-artifacts").as_uri())
        self._run_id: str = self._client.create_run(experiment, run_name=logger.name).info.run_id
        self.url = _page(store, experiment, self._run_id)
        params = [Param(name, str(value)[:_LONGEST_VALUE]) for name, value in config.items() if value is not None]
        self._client.log_batch(self._run_id, params=params)

    def write(self, point: MetricsPoint) -> None:
        """Add the point's numbers at its step."""
        at_ms = round(point.time * 1000)
        metrics = [self._metric(name, float(value), at_ms, point.step) for name, value in numbers(point).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, end: End = "completed") -> None:
        """End the run, in the state that it ended in."""
        self._client.set_terminated(self._run_id, status=_STATES[end])


def _page(store: str, experiment: str, run_id: str) -> str | None:
    """Where a tracking server shows the run, without a user's name or password; a file has no page."""
    parts = urlsplit(store)
    if parts.scheme not in ("http", "https"):
        return None
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/") + "/", "", f"/experiments/{experiment}/runs/{run_id}"))
