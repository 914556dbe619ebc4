"""Data sets before any job: each line checked, and tokens counted when a model is named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from posttrain_service.errors import InvalidRequest
from posttrain_service.launch.tools import run_tool
from posttrain_service.settings import Settings
from posttrain_service.wire.jobs import InlineRows
from posttrain_service.work import rows
from posttrain_service.work.submit import Submitter
from posttrain_trainer.contract.conversation import TrainOn
from posttrain_trainer.contract.methods import Method

INSPECT_TIMEOUT_S = 600.0
SCRATCH_PREFIX = ".check-"
"""Folders in the storage directory that live as long as one check."""
_METHOD: TypeAdapter[Method] = TypeAdapter(Method)


@dataclass(frozen=True)
class Datasets:
    """See `DatasetService`."""

    settings: Settings
    submitter: Submitter
    checker: rows.Checker

    def validate(
        self,
        dataset: str | Mapping[str, Any],
        *,
        model: str | None = None,
        method: Mapping[str, Any] | None = None,
        train_on: TrainOn = "assistant",
    ) -> dict[str, Any]:
        """See `DatasetService.validate`."""
        source = self.submitter.source(_reference(dataset), "dataset")
        asked = _method(method)
        report = rows.report_json(self.checker.report(source, asked, train_on))
        if model is None:
            return report
        found = self.submitter.models.find(model)
        if not report["valid"]:
            return report  # the trainer would only say the same again
        with as_file(source, self.settings) as path:
            train_args = {"method": asked.model_dump(mode="json"), "train_on": train_on}
            payload = {"data_path": str(path), "model_path": found.location, "train_args": train_args}
            counts = run_tool(self.settings.trainer_python, "inspect", payload, INSPECT_TIMEOUT_S)
        return report | {"tokens": {key: value for key, value in counts.items() if key != "rows"}}


@contextmanager
def as_file(source: rows.Source, settings: Settings) -> Iterator[Path]:
    """The rows as a file with an ending that tells its format, for as long as the with-block lasts."""
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=settings.storage_dir))
    try:
        yield folder / rows.place(source, folder, "train")
    finally:
        shutil.rmtree(folder)


def _reference(dataset: str | Mapping[str, Any]) -> str | InlineRows:
    if isinstance(dataset, str):
        return dataset
    try:
        return InlineRows.model_validate(dataset)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in ("dataset", *fault["loc"]))
        raise InvalidRequest(f"{where}: {fault['msg']}", param=where) from error


def _method(method: Mapping[str, Any] | None) -> Method:
    try:
        return _METHOD.validate_python({"kind": "sft"} if method is None else dict(method))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in ("method", *fault["loc"]))
        raise InvalidRequest(f"{where}: {fault['msg']}", param=where) from error
