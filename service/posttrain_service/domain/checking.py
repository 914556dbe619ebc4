"""Jobs that were accepted before their rows were read: what a stored spec says about them. Pure.

Such a job is queued like any other, but is not launched before its rows have been found good. Its spec holds, under
`check`, the request and the values that depend on the rows; the check replaces the whole spec.
"""

from __future__ import annotations

from typing import Any

from posttrain_service.domain.job import Job

CHECK = "check"
"""Key of a spec: `{"request": body of a JobRequest, "auto": names of values left to the rows, "files": names of the fields}`."""


def is_checking(job: Job) -> bool:
    """Whether the job's rows have not been found good yet."""
    return CHECK in job.spec


def left_open(job: Job) -> tuple[str, ...]:
    """Names of values that will be chosen when the rows are known."""
    check: dict[str, Any] = job.spec.get(CHECK, {})
    return tuple(check.get("auto", ()))
