"""Jobs and looks at them, made of a few words."""

from dataclasses import dataclass
from typing import Any

import pytest

from posttrain_service.domain.deadlines import Limits
from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import JobState


@dataclass(frozen=True)
class Look:
    """What a launch backend would have seen."""

    liveness: str = "alive"
    exit: dict[str, Any] | None = None
    started: bool = True
    orphans: bool = False
    heartbeat: dict[str, Any] | None = None
    silence_s: float | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


@pytest.fixture
def look():
    return Look


@pytest.fixture
def make_job():
    def make(state="running", **fields) -> Job:
        run_id = fields.pop("run_id", "00000000-0000-4000-8000-000000000001")
        base = {
            "run_id": run_id, "job_uuid": run_id, "owner": "default", "method": "sft", "model": "m", "spec": {},
            "body_digest": "d", "created_at": 100.0, "moved_at": 100.0, "attempt": 1,
        }  # fmt: skip
        return Job(state=JobState(state), **base | fields)

    return make


@pytest.fixture
def limits():
    return Limits(
        queue_ttl_s=1000, launch_timeout_s=60, stop_grace_s=30, paused_ttl_s=5000, retention_ttl_s=10000,
        heartbeat_s={"import": 100, "load": 200, "train": 50, "save": 300},
    )  # fmt: skip
