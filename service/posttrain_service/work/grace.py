"""How long a run may take to end after it was asked to."""

from __future__ import annotations

from dataclasses import replace

from posttrain_service.domain.deadlines import Limits, stop_grace_s
from posttrain_service.domain.job import Job, Want
from posttrain_service.store.store import Store

_LOOK_BACK = 200


def grace_s(store: Store, job: Job, want: Want, limits: Limits) -> float:
    """Seconds of grace: what the request asks for, and for a pause at least three times what its last save took."""
    own = replace(limits, stop_grace_s=float(job.spec["torchrun"]["shutdown_timeout_s"]))
    return stop_grace_s(want, own, _last_save_s(store, job) if want == "pause" else None)


def _last_save_s(store: Store, job: Job) -> float | None:
    """How long the newest checkpoint took, by the trainer's own word; None when none is among the newest events."""
    for event in store.events.page(job.job_uuid, limit=_LOOK_BACK, newest_first=True).data:
        seconds = event.data.get("seconds") if event.type == "checkpoint" else None
        if isinstance(seconds, int | float):
            return float(seconds)
    return None
