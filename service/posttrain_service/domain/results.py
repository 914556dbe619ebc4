"""Names of what jobs have made: `ft:<model>:posttrain:<suffix>:<job_uuid>[:ckpt-step-<N>]`. Pure.

`<model>` is the base at the root, also where a result was trained further, so names don't grow with each round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain_service.domain.job import Job

_FORM = re.compile(r"ft:(?P<base>.+):posttrain:(?P<suffix>[^:]*):(?P<job_uuid>[^:]+?)(?::ckpt-step-(?P<step>\d{1,12}))?")
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_SUFFIX_LENGTH = 64


@dataclass(frozen=True)
class ResultName:
    """A name taken apart."""

    base: str
    suffix: str
    job_uuid: str
    step: int | None
    """Step of one particular checkpoint; None = the job's result."""


def parse_result(name: str) -> ResultName | None:
    """The parts of a result's name; None when it isn't one."""
    match = _FORM.fullmatch(name)
    if match is None:
        return None
    step = match["step"]
    return ResultName(match["base"], match["suffix"], match["job_uuid"], None if step is None else int(step))


def result_name(job: Job, step: int | None = None) -> str:
    """The name of a job's result, or of its checkpoint at `step`."""
    made_from = parse_result(job.model)
    base = job.model if made_from is None else made_from.base
    suffix = _UNFIT.sub("-", job.name or "").strip("-")[:_SUFFIX_LENGTH]
    return f"ft:{base}:posttrain:{suffix}:{job.job_uuid}" + ("" if step is None else f":ckpt-step-{step}")
