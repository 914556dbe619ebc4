"""A webhook's body and signature, as Standard Webhooks (https://www.standardwebhooks.com) describes them. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import uuid
from typing import TYPE_CHECKING

from posttrain_service.wire.text import finite
from posttrain_service.wire.times import iso

if TYPE_CHECKING:
    from posttrain_service.domain.job import Job


def new_webhook_id() -> str:
    """The id of one message: the same in every try of its delivery, so that the receiver can tell a repeat."""
    return f"msg_{uuid.uuid4().hex}"


def webhook_body(job: Job) -> str:
    """The message that tells of a job's end: its type `job.<state>`, when it ended, and what the job is now."""
    error = None if job.error is None else {key: job.error.get(key) for key in ("code", "message", "rank")}
    data = {
        "job_uuid": job.job_uuid,
        "name": job.name,
        "status": str(job.state),
        "reason": None if job.reason is None else str(job.reason),
        "error": error,
        "method": job.method,
        "model": job.model,
        "attempt": job.attempt,
        "created_at": iso(job.created_at),
        "completed_at": iso(job.ended_at),
        "metadata": dict(job.metadata),
    }
    message = {"type": f"job.{job.state}", "timestamp": iso(job.ended_at), "data": finite(data)}
    return json.dumps(message, ensure_ascii=True, separators=(",", ":"))


def webhook_headers(message_id: str, sent_at: float, body: str, key: bytes | None) -> dict[str, str]:
    """The headers of one try; the signature is over id, time and body, and left out without a key."""
    stamp = str(int(sent_at))
    headers = {
        "content-type": "application/json",
        "user-agent": "posttrain-webhooks",
        "webhook-id": message_id,
        "webhook-timestamp": stamp,
    }
    if key is None:
        return headers
    signed = f"{message_id}.{stamp}.{body}".encode()
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    return headers | {"webhook-signature": f"v1,{base64.b64encode(digest).decode()}"}
