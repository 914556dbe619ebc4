"""Jobs, checkpoints and events as the native API shows them: pure functions of what the use cases hand out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from posttrain_service.domain.lifecycle import JobState
from posttrain_service.domain.results import result_name
from posttrain_service.wire.metrics import point_json
from posttrain_service.wire.text import finite
from posttrain_service.wire.times import iso, unix

if TYPE_CHECKING:
    from posttrain_service.domain.job import Job

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class JobSeen(Protocol):
    """A job with what its run directory and the queue say now."""

    @property
    def job(self) -> Job:
        """The job's row."""

    @property
    def progress(self) -> dict[str, Any] | None:
        """How far it is."""

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The newest metrics point."""

    @property
    def checkpoints(self) -> Sequence[dict[str, Any]]:
        """Complete checkpoints, lowest step first."""

    @property
    def queue_position(self) -> int | None:
        """1 = next; None when it isn't queued."""

    @property
    def resources(self) -> dict[str, Any] | None:
        """What it uses now."""


class EventSeen(Protocol):
    """One event of a job."""

    @property
    def id(self) -> str:
        """Its cursor."""

    @property
    def created_at(self) -> float:
        """Epoch seconds."""

    @property
    def type(self) -> str:
        """What kind of event it is."""

    @property
    def level(self) -> str:
        """info, warn or error."""

    @property
    def message(self) -> str:
        """One sentence for people."""

    @property
    def data(self) -> dict[str, Any]:
        """The same for programs."""


class ModelSeen(Protocol):
    """A base model, or what a job has made."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def created_at(self) -> float:
        """Epoch seconds."""

    @property
    def owned_by(self) -> str:
        """Whose job made it."""

    @property
    def kind(self) -> str:
        """base, full or adapter."""

    @property
    def trainable(self) -> bool:
        """Whether a job may start from it."""

    @property
    def job_uuid(self) -> str | None:
        """The job that made it."""

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint that it is."""


class PageSeen(Protocol[T_co]):
    """One page of a list."""

    @property
    def data(self) -> Sequence[T_co]:
        """The items."""

    @property
    def has_more(self) -> bool:
        """Whether another page follows."""

    @property
    def first_id(self) -> str | None:
        """Cursor for the page before."""

    @property
    def last_id(self) -> str | None:
        """Cursor for the page after."""


def job_json(view: JobSeen) -> dict[str, Any]:
    """The Job object of the native API; every key is always there."""
    job = view.job
    shown = {
        "job_uuid": job.job_uuid,
        "name": job.name,
        "status": str(job.state),
        "reason": None if job.reason is None else str(job.reason),
        "error": _error(job.error),
        "warnings": list(job.warnings),
        "method": job.method,
        "model": job.model,
        "priority": job.priority,
        "created_at": iso(job.created_at),
        "scheduled_at": iso(job.launched_at),
        "started_at": iso(job.started_at),
        "completed_at": iso(job.ended_at),
        "expires_at": iso(job.expires_at),
        "deadline_at": iso(job.deadline_at),
        "attempt": job.attempt,
        "progress": _progress(view.progress),
        "metrics": None if view.metrics is None else point_json(view.metrics),
        "resources_allocated": view.resources,
        "checkpoints": [checkpoint_json(checkpoint) for checkpoint in view.checkpoints],
        "fine_tuned_model": result_name(job) if job.state is JobState.SUCCEEDED and view.checkpoints else None,
        "queue_position": view.queue_position,
        "trackers": _trackers(view.progress),
        "metadata": dict(job.metadata),
        "spec": job.spec,
    }
    cleaned: dict[str, Any] = finite(shown)
    return cleaned


def model_json(model: ModelSeen) -> dict[str, Any]:
    """OpenAI's Model object, with where it comes from."""
    return {
        "id": model.id,
        "object": "model",
        "created": unix(model.created_at),
        "owned_by": model.owned_by,
        "kind": model.kind,
        "trainable": model.trainable,
        "job_uuid": model.job_uuid,
        "checkpoint": model.checkpoint,
    }


def checkpoint_json(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The Checkpoint object of the native API: of the files those that can be downloaded, which excludes `state/`."""
    files = [
        {name: file[name] for name in ("path", "size_bytes", "sha256")}
        for file in checkpoint["files"]
        if not file["path"].startswith("state/")
    ]
    shown = {**checkpoint, "created_at": iso(checkpoint["created_at"]), "files": files}
    cleaned: dict[str, Any] = finite(shown)
    return cleaned


def event_json(event: EventSeen) -> dict[str, Any]:
    """The Event object of the native API."""
    shown = {
        "id": event.id,
        "created_at": iso(event.created_at),
        "type": event.type,
        "level": event.level,
        "message": event.message,
        "data": event.data,
    }
    cleaned: dict[str, Any] = finite(shown)
    return cleaned


def page_json(page: PageSeen[T], show: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    """A list of the native API: `{"data", "has_more", "first_id", "last_id"}`."""
    return {
        "data": [show(item) for item in page.data],
        "has_more": page.has_more,
        "first_id": page.first_id,
        "last_id": page.last_id,
    }


def _error(error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A job's error with its four keys, and the bad lines where there are any."""
    if error is None:
        return None
    shown = {"code": error.get("code"), "message": error.get("message")}
    shown |= {"rank": error.get("rank"), "log_tail": error.get("log_tail")}
    details = error.get("details") or {}
    errors = error.get("errors") or details.get("errors")
    return shown | ({"errors": errors} if errors else {})


def _trackers(progress: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The pages that a heartbeat names; addresses of web pages only, since people will follow them."""
    found = (progress or {}).get("trackers")
    return [
        {"kind": one["kind"], "url": one["url"]}
        for one in (found if isinstance(found, list) else [])
        if isinstance(one, dict) and isinstance(one.get("kind"), str) and str(one.get("url")).startswith(("https://", "http://"))
    ]


def _progress(progress: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Progress with its time in ISO 8601."""
    if progress is None:
        return None
    shown = {key: value for key, value in progress.items() if key not in ("v", "trackers")}
    if isinstance(shown.get("time"), int | float):
        shown["time"] = iso(shown["time"])
    return shown
