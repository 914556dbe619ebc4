"""The service inside another process, asked in llama-stack's words. Everything here blocks; nothing knows of llama-stack's types."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from posttrain_service import compose
from posttrain_service.errors import InvalidRequest, NotFound
from posttrain_service.settings import Settings
from posttrain_service.wire.errors import field_errors, summary
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.wire.llama_request import PreferenceOptimize, SupervisedFineTune
from posttrain_service.wire.llama_translate import LlamaAsked, inward, retold, translate_dpo, translate_sft
from posttrain_service.wire.llama_views import artifacts_json, job_entry, status_json
from posttrain_service.work.terms import Terms

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by the name of their data set."""
M = TypeVar("M", bound=BaseModel)
_MAX_ROWS = 1_000_000
_PURPOSE = "post-training/messages"


class Embedded:
    """A running service.

    Args:
        runtime: Its parts, the loops started.
    """

    def __init__(self, runtime: compose.Runtime) -> None:
        self._runtime = runtime
        self._jobs = runtime.services.jobs
        self._registry = runtime.services.registry
        self._root = f"{runtime.settings.storage_dir}/"
        self._creating = threading.Lock()

    @classmethod
    def begin(cls, settings: Settings) -> Embedded:
        """Build the service and start its loops, which adopt the jobs that still run.

        Raises:
            InvalidSettings: A folder that can't be used.
            StoreMismatch: The database has another schema.
        """
        told = Settings(**settings.model_dump() | {"max_rows_inline": _MAX_ROWS})
        runtime = compose.build(told)
        runtime.start()
        return cls(runtime)

    def end(self) -> None:
        """Stop the loops; jobs run on."""
        self._runtime.stop()

    def health(self) -> dict[str, Any]:
        """What llama-stack shows of a provider's health."""
        good, report = self._runtime.services.health.ready()
        return {"status": "OK" if good else "Error", "message": "" if good else ", ".join(report.get("missing", []))}

    def supervised_fine_tune(self, body: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
        """Queue a supervised fine-tuning; the PostTrainingJob.

        Raises:
            InvalidRequest: A value, a model or rows that cannot be used.
            Conflict: The id is taken by another request.
        """
        return self._create(translate_sft(_checked(SupervisedFineTune, body)), rows, "model")

    def preference_optimize(self, body: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
        """Queue a preference training; arguments and errors as for `supervised_fine_tune`."""
        return self._create(translate_dpo(_checked(PreferenceOptimize, body)), rows, "finetuned_model")

    def jobs(self) -> list[dict[str, Any]]:
        """Every job, newest first."""
        return [job_entry(job_uuid, state) for job_uuid, state in self._jobs.states()]

    def status(self, job_uuid: str) -> dict[str, Any]:
        """How a job is. What llama-stack's model has no field for stands in resources_allocated.

        Raises:
            NotFound: There is no such job.
        """
        status = status_json(self._jobs.get(inward(job_uuid)), self._root)
        more = {key: status.pop(key) for key in ("progress", "error", "warnings")}
        return status | {
            "resources_allocated": {**(status["resources_allocated"] or {}), **more},
            "checkpoints": [_complete(checkpoint) for checkpoint in status["checkpoints"]],
        }

    def artifacts(self, job_uuid: str) -> dict[str, Any]:
        """What a job has made.

        Raises:
            NotFound: There is no such job.
        """
        made = artifacts_json(self._jobs.get(inward(job_uuid)), self._root)
        return made | {"checkpoints": [_complete(checkpoint) for checkpoint in made["checkpoints"]]}

    def cancel(self, job_uuid: str) -> None:
        """Stop a job for good.

        Raises:
            NotFound: There is no such job.
            Conflict: It has ended otherwise.
        """
        self._jobs.cancel(inward(job_uuid))

    def _create(self, asked: LlamaAsked, rows: Rows, model: str) -> dict[str, Any]:
        """Store the job with its own copy of the rows.

        The rows stand under a name made of their content while the job is created, so that the same request again is the
        same job; then the job has them, and the name goes.
        """
        request, terms = asked.request, Terms(unwanted=asked.unwanted, warnings=asked.warnings)
        names = {dataset_id: _name(dataset_id, content) for dataset_id, content in rows.items()}
        with self._creating:
            try:
                for dataset_id, name in names.items():
                    source = {"type": "rows", "rows": rows[dataset_id]}
                    self._registry.register(purpose=_PURPOSE, source=source, metadata={}, dataset_id=name)
                view, _ = self._jobs.create(_with_names(request, names), terms=terms)
            except InvalidRequest as error:
                raise retold(error, model) from error
            finally:
                for name in names.values():
                    with suppress(NotFound):  # registering it failed
                        self._registry.unregister(name)
        return job_entry(view.job.job_uuid, view.job.state)


def dataset_ids(body: Mapping[str, Any]) -> list[str]:
    """Names of the data sets that a request refers to."""
    data = (body.get("training_config") or {}).get("data_config") or {}
    return [data[key] for key in ("dataset_id", "validation_dataset_id") if data.get(key)]


def _with_names(request: JobRequest, names: Mapping[str, str]) -> JobRequest:
    changes = {
        field: names[value]
        for field in ("dataset", "validation_dataset")
        if isinstance(value := getattr(request, field), str) and value in names
    }
    return request.model_copy(update=changes)


def _checked(model: type[M], body: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        faults = field_errors(error.errors(include_url=False), dict(body))
        raise InvalidRequest(summary(faults), param=faults[0]["loc"] or None, errors=faults) from error


def _name(dataset_id: str, rows: Sequence[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return f"{dataset_id[:100]}.{digest}"


def _complete(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as llama-stack's model takes it: metrics whole, or none."""
    metrics = checkpoint["training_metrics"]
    whole = metrics is not None and all(value is not None for value in metrics.values())
    return checkpoint | {"training_metrics": metrics if whole else None}
