"""Rows to values and back. Text from runs is cleaned here: PostgreSQL stores no NUL, JSON no NaN, UTF-8 no surrogates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import RowMapping

from posttrain_service.domain.files import UploadedFile
from posttrain_service.domain.job import Event, Job, RetryPolicy
from posttrain_service.domain.lifecycle import EndReason, JobState

_UNFIT = re.compile("[\x00\ud800-\udfff]")
_JOB_FIELDS = frozenset(field.name for field in fields(Job)) - {"retry"}


def clean(value: Any) -> Any:
    """The same value, fit for any database: NUL and lone surrogates become U+FFFD, NaN and infinities None."""
    if isinstance(value, str):
        return _UNFIT.sub("\ufffd", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item) for item in value]
    return value


def job_columns(job: Job) -> dict[str, Any]:
    """A job as the columns of its row."""
    columns = {name: clean(getattr(job, name)) for name in _JOB_FIELDS}
    return columns | {"retry_max_attempts": job.retry.max_attempts, "retry_on": list(job.retry.on)}


def changed_columns(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changed fields of a job as columns.

    Raises:
        ValueError: A name that is no field, or one that never changes.
    """
    fixed = {"run_id", "job_uuid", "created_at", "state", "moved_at", "version", "metadata", "file_ids", "body_digest"}
    if wrong := sorted(set(changes) - (_JOB_FIELDS - fixed)):
        raise ValueError(f"these fields of a job cannot be changed by a move: {', '.join(wrong)}")
    return {name: clean(value) for name, value in changes.items()}


def to_job(row: RowMapping) -> Job:
    """A row of `jobs` as a Job."""
    values = {name: row[name] for name in _JOB_FIELDS}
    wanted = values["devices_wanted"]
    values["devices_wanted"] = tuple(wanted) if isinstance(wanted, list) else wanted
    values["state"] = JobState(values["state"])
    values["reason"] = None if values["reason"] is None else EndReason(values["reason"])
    return Job(**values, retry=RetryPolicy(row["retry_max_attempts"], tuple(row["retry_on"])))


def to_event(row: RowMapping) -> Event:
    """A row of `events` as an Event; the job's id is taken from the joined row."""
    return Event(**{field.name: row[field.name] for field in fields(Event)})


def to_file(row: RowMapping) -> UploadedFile:
    """A row of `files` as an UploadedFile."""
    return UploadedFile(**{field.name: row[field.name] for field in fields(UploadedFile)})
