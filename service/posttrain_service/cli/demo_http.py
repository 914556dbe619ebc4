"""The demo's side of the HTTP API: upload, validate, create, look, download."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

API = "/post_training"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class DemoError(Exception):
    """Something that the demo needs cannot be had; the message is one sentence for people."""


class UnknownModel(DemoError):
    """The service answers, but does not have the model: it keeps its models elsewhere."""


def connect(address: str, timeout_s: float = 60.0) -> httpx.Client:
    """A client for the service at `address`: with the API key where there is one, past any proxy on this machine."""
    key = os.environ.get("POSTTRAIN_API_KEY")
    return httpx.Client(
        base_url=address,
        timeout=timeout_s,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        trust_env=httpx.URL(address).host not in LOOPBACK,
    )


class Service:
    """The service at one address. Every method raises DemoError with the service's own words when it refuses."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._http = connect(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def version(self) -> str:
        """The version of the service."""
        return str(self._call("GET", "/version")["version"])

    def find_job(self, metadata: dict[str, str]) -> dict[str, Any] | None:
        """The newest job with these notes that succeeded or still can; None when there is none."""
        notes = {f"metadata[{key}]": value for key, value in metadata.items()}
        page = self._call("GET", f"{API}/jobs", params=notes | {"limit": "100"})
        alive = (job for job in page["data"] if job["status"] not in ("failed", "cancelled", "paused"))
        return next(alive, None)

    def upload(self, filename: str, rows: bytes) -> str:
        """Store a file of rows; returns its id."""
        files = {"file": (filename, rows, "application/jsonl")}
        return str(self._call("POST", "/v1/files", files=files, data={"purpose": "fine-tune"})["id"])

    def validate(self, file_id: str) -> dict[str, Any]:
        """The report on an uploaded file: valid, rows, errors with their lines."""
        return self._call("POST", f"{API}/datasets/validate", json={"dataset": file_id})

    def create(self, request: dict[str, Any]) -> dict[str, Any]:
        """Queue a job. Raises UnknownModel when the service does not have the model."""
        return self._call("POST", f"{API}/jobs", json=request)

    def job(self, job_uuid: str) -> dict[str, Any]:
        """The job now."""
        return self._call("GET", f"{API}/jobs/{job_uuid}")

    def download(self, job_uuid: str, folder: Path) -> Path:
        """Fetch the newest checkpoint's files and check their hashes; returns its `model` folder on this machine."""
        checkpoints = self._call("GET", f"{API}/jobs/{job_uuid}/checkpoints")["data"]
        if not checkpoints:
            raise DemoError(f"job {job_uuid} succeeded but has no checkpoint; see its events")
        newest = max(checkpoints, key=lambda checkpoint: int(checkpoint["step"]))
        target = (folder / job_uuid / str(newest["id"])).resolve()
        for file in newest["files"]:
            if file["path"].startswith("model/"):
                self._fetch(f"{API}/jobs/{job_uuid}/checkpoints/{newest['id']}/files/{file['path']}", target, file)
        return target / "model"

    def _fetch(self, url: str, target: Path, file: dict[str, Any]) -> None:
        path = (target / file["path"]).resolve()
        if not path.is_relative_to(target):
            raise DemoError(f"the service named a file outside its checkpoint: {file['path']!r}")
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        digest = hashlib.sha256()
        try:
            with self._http.stream("GET", url) as answer, part.open("wb") as out:
                if answer.is_error:
                    answer.read()
                    raise _refused(answer)
                for block in answer.iter_bytes():
                    digest.update(block)
                    out.write(block)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if digest.hexdigest() != file["sha256"]:
            raise DemoError(f"{file['path']} arrived damaged; say the same again to fetch it anew")
        part.replace(path)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.is_error:
            raise _refused(answer)
        data: dict[str, Any] = answer.json()
        return data

    def _unreachable(self, error: httpx.HTTPError) -> DemoError:
        return DemoError(f"the service at {self.address} does not answer ({type(error).__name__}: {error}); is it running?")


def _refused(answer: httpx.Response) -> DemoError:
    try:
        error = answer.json()["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return DemoError(f"{answer.request.url.path} answered {answer.status_code}, and not as a posttrain service does")
    kind = UnknownModel if param == "model" else DemoError
    return kind(message)
