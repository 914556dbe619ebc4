"""A small HTTP client for the native API and the file routes: what the command line and remote adapters use.

Standard use::

    with Client("http://127.0.0.1:8484") as client:
        file_id = client.upload(Path("rows.jsonl"))["id"]
        job = client.create_job({"model": "smollm2-135m-instruct", "dataset": file_id})
        job = client.wait(job["job_uuid"], progress=print)

`AsyncClient` has the same methods, to be awaited or iterated with `async for`.
"""

from posttrain_service.client.aio import AsyncClient
from posttrain_service.client.base import ApiError, ServerEvent, ServerGone, StreamKind, parse_sse
from posttrain_service.client.sync import Client

__all__ = ["ApiError", "AsyncClient", "Client", "ServerEvent", "ServerGone", "StreamKind", "parse_sse"]
