"""Jobs, events, checkpoints, models, uploads and results in OpenAI's shapes: pure functions of what the use cases hand out."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain_service.domain.checking import is_checking, left_open
from posttrain_service.domain.lifecycle import JobState, is_terminal, openai_status
from posttrain_service.domain.results import result_name
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.files import file_json
from posttrain_service.wire.openai_request import base_rate
from posttrain_service.wire.text import finite
from posttrain_service.wire.times import unix
from posttrain_service.wire.views import EventSeen, JobSeen

if TYPE_CHECKING:
    from posttrain_service.domain.files import UploadedFile
    from posttrain_service.domain.job import Job
    from posttrain_service.domain.uploads import PartedUpload

ORGANIZATION = "posttrain"
RESULT_COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
_RESULT_KEYS = ("step", "loss", "accuracy", "validation_loss", "validation_accuracy")
_METRIC_NAMES = {
    "loss": "train_loss",
    "accuracy": "train_mean_token_accuracy",
    "validation_loss": "valid_loss",
    "validation_accuracy": "valid_mean_token_accuracy",
}
_NAMES = {"sft": "supervised"}
_FILE_REASONS = ("invalid_data",)


def fine_tuning_job_json(view: JobSeen, results: Sequence[str] = ()) -> dict[str, Any]:
    """The FineTuningJob object; every key is always there.

    Args:
        view: The job.
        results: Ids of its result files.
    """
    job = view.job
    ended = is_terminal(job.state)
    hyper = hyperparameters(job)
    name = _NAMES.get(job.method, job.method)
    tokens = (view.progress or {}).get("tokens_seen")
    shown: dict[str, Any] = {
        "id": job.job_uuid,
        "object": "fine_tuning.job",
        "created_at": unix(job.created_at),
        "error": _error(job),
        "fine_tuned_model": result_name(job) if job.state is JobState.SUCCEEDED else None,
        "finished_at": unix(job.ended_at) if ended else None,
        "hyperparameters": {key: value for key, value in hyper.items() if key != "beta"},
        "model": job.model,
        "organization_id": ORGANIZATION,
        "result_files": list(results),
        "seed": job.spec["training"]["random_seed"],
        "status": openai_status(job.state, validating=is_checking(job)),
        "trained_tokens": tokens if ended else None,
        "training_file": _file(job.spec["dataset"]) or "inline",
        "validation_file": _file(job.spec["validation_dataset"]),
        "estimated_finish": _estimate(view),
        "integrations": _integrations(job),
        "metadata": dict(job.metadata) or None,
        "method": {"type": name, name: {"hyperparameters": hyper}},
        "warnings": list(job.warnings),
    }
    cleaned: dict[str, Any] = finite(shown)
    return cleaned


def hyperparameters(job: Job) -> dict[str, Any]:
    """OpenAI's hyperparameters of a job: numbers, or `auto` while the rows have not been read."""
    training = job.spec["training"]
    auto = left_open(job)
    rate = base_rate(job.method, adapter=training["lora"] is not None)
    shown: dict[str, Any] = {
        "n_epochs": "auto" if "num_epochs" in auto else training["num_epochs"],
        "batch_size": "auto" if "effective_batch_size" in auto else training["effective_batch_size"],
        "learning_rate_multiplier": float(f"{training['learning_rate'] / rate:.6g}"),
    }
    if job.method == "dpo":
        shown["beta"] = job.spec["method"]["beta"]
    return shown


def timeline(
    events: Sequence[EventSeen], points: Sequence[Mapping[str, Any]], total_steps: int | None
) -> list[dict[str, Any]]:
    """Events and metrics points of a job as FineTuningJobEvents, newest first."""
    keyed = [((event.created_at, 1, int(event.id)), _event(event)) for event in events]
    for point in points:
        keyed.append(((point["time"], 0, point["step"]), _metrics_event(point, total_steps)))
    keyed.sort(key=lambda item: item[0], reverse=True)
    cleaned: list[dict[str, Any]] = finite([item for _, item in keyed])
    return cleaned


def checkpoint_json(job: Job, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The FineTuningJobCheckpoint object."""
    step = checkpoint["step"]
    metrics = {_METRIC_NAMES[key]: value for key, value in checkpoint["metrics"].items() if key in _METRIC_NAMES}
    shown = {
        "id": f"ftckpt_{job.run_id.replace('-', '')}_{step}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": unix(checkpoint["created_at"]),
        "fine_tuning_job_id": job.job_uuid,
        "fine_tuned_model_checkpoint": result_name(job, step),
        "step_number": step,
        "metrics": {"step": step, **metrics},
    }
    cleaned: dict[str, Any] = finite(shown)
    return cleaned


def upload_json(upload: PartedUpload, status: str, file: UploadedFile | None) -> dict[str, Any]:
    """The Upload object."""
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.size_bytes,
        "created_at": unix(upload.created_at),
        "expires_at": unix(upload.expires_at),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": status,
        "file": None if file is None else file_json(file),
    }


def part_json(part_id: str, upload_id: str, created_at: float) -> dict[str, Any]:
    """The UploadPart object."""
    return {"id": part_id, "object": "upload.part", "created_at": unix(created_at), "upload_id": upload_id}


def list_json(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A list in OpenAI's shape; clients page by `after` = the last id."""
    ids = [item["id"] for item in data]
    return {
        "object": "list",
        "data": list(data),
        "has_more": has_more,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def page_of(items: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """The page of a whole list that follows the item `after`.

    Raises:
        InvalidRequest: `after` names none of the items.
    """
    start = 0
    if after is not None:
        start = next((place for place, item in enumerate(items, 1) if item["id"] == after), 0)
        if start == 0:
            raise InvalidRequest(f"after names no item of this list: {after[:140]!r}", code="invalid_cursor", param="after")
    return list_json(items[start : start + limit], has_more=len(items) > start + limit)


def results_csv(points: Sequence[Mapping[str, Any]]) -> bytes:
    """The result file: one row a step, empty cells where something was not measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(RESULT_COLUMNS)
    for point in points:
        row: list[Any] = finite([point.get(key) for key in _RESULT_KEYS])
        writer.writerow(row)  # None becomes an empty cell
    return text.getvalue().encode()


def bad_lines(errors: Sequence[Mapping[str, Any]], most: int = 20) -> str:
    """The first bad lines of a data set as one text."""
    told = [f"line {error['line']}: {error['message']}" for error in errors[:most]]
    more = len(errors) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _event(event: EventSeen) -> dict[str, Any]:
    return {
        "id": f"ftevent-{event.id}",
        "object": "fine_tuning.job.event",
        "created_at": unix(event.created_at),
        "level": event.level,
        "message": event.message,
        "type": "message",
        "data": event.data,
    }


def _metrics_event(point: Mapping[str, Any], total_steps: int | None) -> dict[str, Any]:
    step = point["step"]
    data = {to: point[key] for key, to in _METRIC_NAMES.items() if point.get(key) is not None}
    of = "" if total_steps is None else f"/{total_steps}"
    losses = [f"{label} loss={data[key]:.4f}" for key, label in _LOSSES if isinstance(data.get(key), int | float)]
    return {
        "id": f"ftevent-step-{step}",
        "object": "fine_tuning.job.event",
        "created_at": unix(point["time"]),
        "level": "info",
        "message": f"Step {step}{of}" + (f": {', '.join(losses)}" if losses else ""),
        "type": "metrics",
        "data": {"step": step, "total_steps": total_steps, **data},
    }


_LOSSES = (("train_loss", "training"), ("valid_loss", "validation"))


def _file(reference: Mapping[str, Any] | None) -> str | None:
    return None if reference is None else reference.get("file")


def _error(job: Job) -> dict[str, Any] | None:
    if job.error is None:
        return None
    code = job.error.get("code")
    param = job.error.get("param") or ("training_file" if code in _FILE_REASONS else None)
    return {"code": code, "message": job.error.get("message"), "param": param}


def _estimate(view: JobSeen) -> int | None:
    progress = view.progress or {}
    time, eta_s = progress.get("time"), progress.get("eta_s")
    if view.job.state is not JobState.RUNNING or not isinstance(time, int | float) or not isinstance(eta_s, int | float):
        return None
    return unix(time + eta_s)


def _integrations(job: Job) -> list[dict[str, Any]]:
    loggers = job.spec["training"]["loggers"]
    options = [{key: value for key, value in logger.items() if key != "kind"} for logger in loggers if logger["kind"] == "wandb"]
    return [{"type": "wandb", "wandb": option} for option in options]
