"""Jobs, checkpoints and data sets in llama-stack's shapes: pure functions of what the use cases hand out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain_service.domain.lifecycle import JobState, llama_stack_status
from posttrain_service.domain.results import result_name
from posttrain_service.wire.llama_translate import outward
from posttrain_service.wire.text import finite
from posttrain_service.wire.times import iso
from posttrain_service.wire.views import JobSeen, job_json

if TYPE_CHECKING:
    from posttrain_service.domain.job import Job
    from posttrain_service.domain.registered import RegisteredSet

PROVIDER = "posttrain"


def job_entry(job_uuid: str, state: JobState) -> dict[str, Any]:
    """A PostTrainingJob; its status is more than llama-stack tells, and clients keep it."""
    return {"job_uuid": outward(job_uuid), "status": llama_stack_status(state)}


def status_json(view: JobSeen, root: str) -> dict[str, Any]:
    """The PostTrainingJobStatusResponse; every key is always there.

    Args:
        view: The job.
        root: What stands before the storage directory's own names in paths: its path and a slash, or nothing.
    """
    job, native = view.job, job_json(view)
    more = {key: native[key] for key in ("resources_allocated", "error", "progress", "warnings")}
    return artifacts_json(view, root) | more | {
        "status": llama_stack_status(job.state),
        "scheduled_at": iso(job.created_at),
        "started_at": iso(job.started_at),
        "completed_at": iso(job.ended_at),
    }  # fmt: skip


def artifacts_json(view: JobSeen, root: str) -> dict[str, Any]:
    """The PostTrainingJobArtifactsResponse; arguments as for `status_json`."""
    checkpoints = [_checkpoint(view.job, checkpoint, root) for checkpoint in view.checkpoints]
    return {"job_uuid": outward(view.job.job_uuid), "checkpoints": checkpoints}


def dataset_json(registered: RegisteredSet) -> dict[str, Any]:
    """The Dataset object."""
    return {
        "type": "dataset",
        "identifier": registered.dataset_id,
        "provider_resource_id": registered.file_id,
        "provider_id": PROVIDER,
        "purpose": registered.purpose,
        "source": registered.source | ({"rows": []} if registered.source["type"] == "rows" else {}),
        "metadata": dict(registered.metadata),
    }


def rows_json(rows: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of rows."""
    cleaned: dict[str, Any] = finite({"data": [dict(row) for row in rows], "has_more": has_more, "url": None})
    return cleaned


def _checkpoint(job: Job, checkpoint: Mapping[str, Any], root: str) -> dict[str, Any]:
    return {
        "identifier": result_name(job, checkpoint["step"]),
        "created_at": iso(checkpoint["created_at"]),
        "epoch": int(checkpoint["epoch"]),
        "post_training_job_id": outward(job.job_uuid),
        "path": f"{root}jobs/{job.run_id}/checkpoints/{checkpoint['id']}/model",
        "training_metrics": _metrics(checkpoint),
    }


def _metrics(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    train, validation = (_number(checkpoint["metrics"].get(key)) for key in ("loss", "validation_loss"))
    if train is None and validation is None:
        return None
    return {
        "epoch": int(checkpoint["epoch"]),
        "train_loss": train,
        "validation_loss": validation,
        "perplexity": None if validation is None or validation > _MAX_EXPONENT else math.exp(validation),
    }


_MAX_EXPONENT = 700.0
"""Beyond it e to the power is no double any more."""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
