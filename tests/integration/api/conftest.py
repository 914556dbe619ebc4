"""The application over services that live in memory, and the application over the real ones."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from posttrain_service.app import create_app
from posttrain_service.domain.files import UploadedFile, check_purpose, expiry
from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import JobState, check_verb
from posttrain_service.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge
from posttrain_service.settings import Settings
from posttrain_service.work.services import EventView, JobView, LogText, ModelView, Page, Services, StreamItem

NOW = 1_700_000_000.25
BASE = "http://127.0.0.1:8484"


class FakeJobs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, Job] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.points: list[dict[str, Any]] = []
        self.log = b""
        self.found: list[dict[str, Any]] = []

    def create(self, request, *, idempotency_key=None, owner=""):
        for known, value in ((self.keys.get(idempotency_key), "key"), (request.job_uuid, "id")):
            if known in self.jobs:
                if self.jobs[known].body_digest != request.digest():
                    error = InvalidRequest if value == "key" else Conflict
                    raise error("taken by another request", code="job_exists", param="job_uuid")
                return self.get(known), False
        uuid = request.job_uuid or f"job-{len(self.jobs)}"
        self.jobs[uuid] = Job(
            run_id=uuid, job_uuid=uuid, owner="default", state=JobState.QUEUED, method=request.method.kind,
            model=request.model, spec={"model": request.model}, body_digest=request.digest(),
            created_at=NOW + len(self.jobs), metadata=dict(request.metadata), name=request.name,
        )  # fmt: skip
        if idempotency_key:
            self.keys[idempotency_key] = uuid
        return self.get(uuid), True

    def plan(self, request, *, owner=""):
        return {"spec": {"model": request.model}, "argv": ["python"], "env": ["A"], "devices": ["cpu:0"], "dataset": None,
                "memory": None, "parameters": None, "trainable_parameters": None, "steps": 3, "tokens": 10, "packing": None, "warnings": []}  # fmt: skip

    def _job(self, job_uuid):
        if job_uuid not in self.jobs:
            raise NotFound(f"there is no job {job_uuid!r}", code="job_not_found", param="job_uuid")
        return self.jobs[job_uuid]

    def get(self, job_uuid):
        return JobView(self._job(job_uuid), **self.views.get(job_uuid, {}))

    def page(self, **query):
        self.calls.append(("page", query))
        found = sorted(self.jobs.values(), key=lambda job: -job.created_at)
        if query["after"] is not None:
            found = [job for job in found if job.created_at < self._job(query["after"]).created_at]
        if query["status"]:
            found = [job for job in found if job.state in query["status"]]
        for name, value in (query["metadata"] or {}).items():
            found = [job for job in found if job.metadata.get(name) == value]
        page = [JobView(job) for job in found[: query["limit"]]]
        ends = (page[0].job.job_uuid, page[-1].job.job_uuid) if page else (None, None)
        return Page(page, len(found) > query["limit"], *ends)

    def _verb(self, verb, job_uuid, target):
        job = self._job(job_uuid)
        if check_verb(verb, job_uuid, job.state, job.want, job.reason):
            self.jobs[job_uuid] = replace(job, state=target)
        return self.get(job_uuid)

    def cancel(self, job_uuid):
        return self._verb("cancel", job_uuid, JobState.CANCELLED)

    def pause(self, job_uuid):
        return self._verb("pause", job_uuid, JobState.PAUSED)

    def resume(self, job_uuid):
        return self._verb("resume", job_uuid, JobState.QUEUED)

    def retry(self, job_uuid):
        return self._verb("retry", job_uuid, JobState.QUEUED)

    def delete(self, job_uuid):
        self._verb("delete", job_uuid, self._job(job_uuid).state)
        del self.jobs[job_uuid]

    def events(self, job_uuid, *, after=None, limit=100, newest_first=False):
        self._job(job_uuid)
        events = [EventView(str(n), NOW + n, "note", "info", f"event {n}") for n in range(1, 6)]
        events = events[::-1] if newest_first else events
        if after is not None:
            events = [e for e in events if (int(e.id) < int(after)) == newest_first and e.id != after]
        page = events[:limit]
        return Page(page, len(events) > limit, *((page[0].id, page[-1].id) if page else (None, None)))

    def logs(self, job_uuid, *, attempt=None, source=None, tail=None, offset=None, limit=None):
        self._job(job_uuid)
        self.calls.append(("logs", {"attempt": attempt, "source": source, "tail": tail, "offset": offset, "limit": limit}))
        start, end = offset or 0, len(self.log)
        if tail is not None:
            start = end - len(b"".join(self.log.splitlines(keepends=True)[-tail:]))
        elif limit is not None:
            end = min(end, start + limit)
            while end < len(self.log) and self.log[end] & 0xC0 == 0x80:  # never inside a character
                end -= 1
        text = self.log[start:end].decode("utf-8", "replace")
        return LogText(text, attempt or 1, source or "rank-0", start, end, len(self.log))

    def log_sources(self, job_uuid):
        return {1: ["torchrun", "rank-0"]}

    def metrics(self, job_uuid, *, names=None, after_step=None, max_points=None):
        self._job(job_uuid)
        self.calls.append(("metrics", {"names": names, "after_step": after_step, "max_points": max_points}))
        points = [p for p in self.points if after_step is None or p["step"] > after_step]
        return [{k: v for k, v in p.items() if names is None or k in (*names, "step")} for p in points]

    def checkpoints(self, job_uuid):
        self._job(job_uuid)
        return self.found

    def checkpoint(self, job_uuid, checkpoint_id):
        for found in self.checkpoints(job_uuid):
            if found["id"] == checkpoint_id:
                return found
        raise NotFound(f"there is no checkpoint {checkpoint_id!r}")

    def checkpoint_files(self, job_uuid, checkpoint_id):
        found = self.checkpoint(job_uuid, checkpoint_id)
        return [(f["path"], self.folder / f["path"], f["size_bytes"]) for f in found["files"] if not f["path"].startswith("state/")]

    def checkpoint_file(self, job_uuid, checkpoint_id, path):
        for name, file, size in self.checkpoint_files(job_uuid, checkpoint_id):
            if name == path:
                return file, size
        raise NotFound(f"there is no file {path!r}")

    def delete_checkpoint(self, job_uuid, checkpoint_id):
        self.found.remove(self.checkpoint(job_uuid, checkpoint_id))


class FakeFiles:
    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.files: dict[str, UploadedFile] = {}
        self.largest_read = 0
        self.first_read = threading.Event()

    def create(self, source, *, filename, purpose, owner="", expires_after_s=None, idempotency_key=None):
        check_purpose(purpose)
        expires_at = expiry(NOW, expires_after_s)
        digest, size = hashlib.sha256(), 0
        partial = self.folder / "partial"
        try:
            with partial.open("wb") as file:
                while data := source.read(65536):
                    self.first_read.set()
                    self.largest_read = max(self.largest_read, len(data))
                    size += len(data)
                    if size > self.settings.max_upload_bytes:
                        raise PayloadTooLarge(f"more than {self.settings.max_upload_bytes} bytes")
                    digest.update(data)
                    file.write(data)
        except BaseException:
            partial.unlink()
            raise
        file_id = f"file-{len(self.files):032x}"
        partial.rename(self.folder / file_id)
        self.files[file_id] = UploadedFile(
            file_id, "default", filename, purpose, size, digest.hexdigest(), NOW + len(self.files), expires_at
        )
        return self.files[file_id]

    def get(self, file_id):
        if file_id not in self.files:
            raise NotFound(f"there is no file {file_id!r}", code="file_not_found")
        return self.files[file_id]

    def page(self, *, after=None, limit=100, purpose=None, owner=None, newest_first=True):
        found = sorted(self.files.values(), key=lambda f: f.created_at, reverse=newest_first)
        if purpose is not None:
            found = [f for f in found if f.purpose == purpose]
        if after is not None:
            found = found[[f.id for f in found].index(after) + 1 :]
        page = found[:limit]
        return Page(page, len(found) > limit, *((page[0].id, page[-1].id) if page else (None, None)))

    def content(self, file_id):
        return self.folder / file_id, self.get(file_id)

    def delete(self, file_id):
        del self.files[self.get(file_id).id]


class FakeDatasets:
    def validate(self, dataset, *, model=None, method=None, train_on="assistant"):
        self.asked = (dataset, model, method)
        return {"valid": False, "rows": 1, "format": None, "errors": [{"line": 1, "message": "bad"}], "num_errors": 1}


class FakeModels:
    names = ("tiny", "org/small", "ft:tiny:posttrain::j-1")

    def page(self, *, after=None, limit=100):
        found = [self.get(name) for name in self.names[0 if after is None else self.names.index(after) + 1 :]]
        return Page(found[:limit], len(found) > limit, found[0].id, found[: limit][-1].id)

    def get(self, name):
        if name not in self.names:
            raise NotFound(f"there is no model {name!r}", code="model_not_found")
        made = name.startswith("ft:")
        return ModelView(name, NOW, "default" if made else "local", "full" if made else "base", True, "j-1" if made else None)


@dataclass
class FakeStreams:
    jobs: FakeJobs
    items: list[StreamItem] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    endless: bool = False
    closed: threading.Event = field(default_factory=threading.Event)

    def _open(self, kind, job_uuid, **query):
        self.jobs._job(job_uuid)
        self.asked.append((kind, query))
        return self._items()

    async def _items(self):
        for item in self.items:
            yield item
        while self.endless and not self.closed.is_set():
            yield StreamItem("heartbeat")
            await asyncio.sleep(0.01)

    def events(self, job_uuid, **query):
        return self._open("events", job_uuid, **query)

    def logs(self, job_uuid, **query):
        return self._open("logs", job_uuid, **query)

    def metrics(self, job_uuid, **query):
        return self._open("metrics", job_uuid, **query)

    def close(self):
        self.closed.set()


class FakeHealth:
    good = True

    def live(self):
        return {"status": "ok"}

    def ready(self):
        return self.good, {"status": "ok" if self.good else "unavailable", "missing": [] if self.good else ["disk"]}

    def version(self):
        return {"version": "0.1.0", "contract": 1, "python": "3.11", "trainer": None}

    def metrics(self, accept):
        return f"# {accept}\n".encode(), "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class FakeRuntime:
    services: Services
    started: int = 0
    stopped: int = 0

    def start(self):
        self.started += 1

    def stop(self):
        self.stopped += 1


def fake_runtime(folder: Path, settings: Settings) -> FakeRuntime:
    jobs = FakeJobs(folder)
    others = FakeFiles(folder, settings), FakeDatasets(), FakeModels(), FakeStreams(jobs), FakeHealth(), settings, None
    return FakeRuntime(Services(jobs, *others, SimpleNamespace(caller=lambda sent: None), SimpleNamespace()))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(storage_dir=tmp_path / "storage", max_upload_bytes=300_000)


@pytest.fixture
def fake(tmp_path: Path, settings: Settings) -> FakeRuntime:
    return fake_runtime(tmp_path, settings)


@pytest.fixture
def http(fake: FakeRuntime, settings: Settings) -> Iterator[TestClient]:
    app = create_app(settings, build=lambda told: fake)
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def job(http: TestClient) -> dict[str, Any]:
    return http.post("/post_training/jobs", json={"model": "m", "dataset": "file-1", "job_uuid": "j"}).json()


@contextmanager
def _serving(app: Any, port: int = 0) -> Iterator[str]:
    """The application under uvicorn on a port (0 = a free one), in a thread; gives its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    sock.listen()  # connections wait until the server accepts them
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serving():
    """Runs an application under uvicorn: a context manager that gives its address."""
    return _serving


@pytest.fixture
def served(fake: FakeRuntime, settings: Settings) -> Iterator[str]:
    """A real server over the services in memory, for clients that bring their own HTTP."""
    with _serving(create_app(settings, build=lambda told: fake)) as address:
        yield address
