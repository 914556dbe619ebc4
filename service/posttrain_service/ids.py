"""Ids: how they are made, and what a foreign one must look like before it touches a row or a path."""

from __future__ import annotations

import re
import uuid

from posttrain_service.errors import InvalidRequest

_JOB_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_UPLOAD_ID = re.compile(r"upload_[0-9a-f]{32}")
_PART_ID = re.compile(r"part_[0-9a-f]{32}")
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def new_run_id() -> str:
    """A run id: the UUID that names a run's folder, its processes' marker and its locks."""
    return str(uuid.uuid4())


def new_file_id() -> str:
    """An uploaded file's id, `file-` and 32 hex digits."""
    return f"file-{uuid.uuid4().hex}"


def new_upload_id() -> str:
    """The id of an upload in parts, `upload_` and 32 hex digits."""
    return f"upload_{uuid.uuid4().hex}"


def new_part_id() -> str:
    """The id of one part of an upload, `part_` and 32 hex digits."""
    return f"part_{uuid.uuid4().hex}"


def is_upload_id(text: str) -> bool:
    """Whether `text` has the form of an upload's id (and so may be a folder's name)."""
    return _UPLOAD_ID.fullmatch(text) is not None


def is_part_id(text: str) -> bool:
    """Whether `text` has the form of a part's id (and so may be a file's name)."""
    return _PART_ID.fullmatch(text) is not None


def new_request_id() -> str:
    """The id of one HTTP request, `req-` and 32 hex digits."""
    return f"req-{uuid.uuid4().hex}"


def new_holder_id() -> str:
    """The name under which one server process holds leases."""
    return f"server-{uuid.uuid4().hex}"


def is_run_id(text: str) -> bool:
    """Whether `text` has the form of a run id (and so may be a folder's name)."""
    return _RUN_ID.fullmatch(text) is not None


def is_file_id(text: str) -> bool:
    """Whether `text` has the form of a file id (and so may be a file's name)."""
    return _FILE_ID.fullmatch(text) is not None


def check_job_uuid(text: str) -> str:
    """A job id chosen by a client of the native API, unchanged.

    Raises:
        InvalidRequest: It has characters or a length that ids may not have.
    """
    if _JOB_UUID.fullmatch(text) is None:
        raise InvalidRequest(
            f"job_uuid {text[:140]!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            code="invalid_job_uuid",
            param="job_uuid",
        )
    return text
