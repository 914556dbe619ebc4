"""Models that jobs may start from: base models under models/, and what earlier jobs have made, by their names.

A job that starts from a result gets the weights into its own folder (hard-linked where the file system allows; no one
writes to them any more), so it doesn't depend on the earlier job's retention.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.domain.results import parse_result, result_name
from posttrain_service.errors import InvalidRequest, NotFound
from posttrain_service.runs import read
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work import models
from posttrain_service.work.services import ModelView, Page
from posttrain_trainer.contract.rundir import RunDir, sync_folder

PLACED = "data/model"
"""Where a run keeps the result that it starts from, below its folder."""


@dataclass(frozen=True)
class Models:
    """See `ModelService`."""

    settings: Settings
    store: Store

    def find(self, name: str) -> models.Model:
        """The model that a request names: a result, or any other as `models.find` knows it.

        Raises:
            InvalidRequest: There is none, or it can't be trained further as it is.
        """
        if parse_result(name) is None:
            return models.find(name, self.settings.base_models_dir)
        try:
            job, checkpoint = self._checkpoint(name)
        except NotFound as error:
            raise InvalidRequest(error.message, code="model_not_found", param="model") from error
        folder = _loadable(checkpoint)
        if folder is None:
            raise InvalidRequest(
                f"{name} is a LoRA adapter, and training goes on from whole models only: train it with "
                "training.merge_lora, and name that job's result",
                code="model_is_adapter",
                param="model",
            )
        path = self._run_dir(job).checkpoint(checkpoint["id"]) / folder
        return models.at(name, path, self._run_dir(job).path)

    def page(self, *, after: str | None = None, limit: int = 100) -> Page[ModelView]:
        """See `ModelService.page`."""
        if not 1 <= limit <= 1000:
            raise InvalidRequest(f"limit is {limit}; give 1 to 1000", param="limit")
        bases = models.names(self.settings.base_models_dir)
        made = None if after is None else parse_result(after)
        if after is not None and made is None and after not in bases:
            raise InvalidRequest(f"there is no model {after[:300]!r} to go on after", param="after")
        start = 0 if after is None else len(bases) if made is not None else bases.index(after) + 1
        views = [self._base(name) for name in bases[start : start + limit + 1]]
        cursor = None if made is None else made.job_uuid
        more = True
        while more and len(views) <= limit:
            found = self.store.jobs.page(after=cursor, limit=100, status=[JobState.SUCCEEDED])
            views += [view for job in found.data if (view := self._result(job)) is not None]
            more = found.has_more
            cursor = found.data[-1].job_uuid if found.data else None
        shown = views[:limit]
        return Page(shown, len(views) > limit, shown[0].id if shown else None, shown[-1].id if shown else None)

    def get(self, name: str) -> ModelView:
        """See `ModelService.get`."""
        if parse_result(name) is None:
            if name not in models.names(self.settings.base_models_dir):
                raise NotFound(f"there is no model {name[:300]!r} on this server", code="model_not_found", param="model")
            return self._base(name)
        job, checkpoint = self._checkpoint(name)
        return _view(name, job, checkpoint)

    def _checkpoint(self, name: str) -> tuple[Job, Mapping[str, Any]]:
        """The job that a result's name leads to, and the complete checkpoint that is meant."""
        parts = parse_result(name)
        assert parts is not None
        job = self.store.jobs.get(parts.job_uuid)
        if job is None or result_name(job, parts.step) != name:
            hint = "" if job is None else f"; that job's result is {result_name(job)}"
            raise _missing(f"there is no model {name[:600]!r} on this server{hint}")
        if parts.step is None and job.state is not JobState.SUCCEEDED:
            raise _missing(
                f"job {job.job_uuid} is {job.state} and has no result yet; one of its checkpoints is named by :ckpt-step-N"
            )
        found = read.checkpoints(self._run_dir(job))
        chosen = [c for c in found if parts.step is None or c["step"] == parts.step]
        if not chosen:
            have = ", ".join(str(c["step"]) for c in found) or "none"
            raise _missing(f"{name[:600]}: its checkpoint is not there; steps of those that are: {have}")
        return job, chosen[-1]

    def _base(self, name: str) -> ModelView:
        created_at = (self.settings.base_models_dir / name / "config.json").stat().st_mtime
        return ModelView(name, created_at, "local", "base", trainable=True)

    def _result(self, job: Job) -> ModelView | None:
        found = read.checkpoints(self._run_dir(job))
        return _view(result_name(job), job, found[-1]) if found else None

    def _run_dir(self, job: Job) -> RunDir:
        return RunDir(self.settings.jobs_dir / job.run_id)


def is_made(name: str) -> bool:
    """Whether the name is that of something a job has made."""
    return parse_result(name) is not None


def place_model(model: models.Model, run_dir: RunDir) -> str:
    """Put a result that a job starts from into the job's own folder, durably; its path below that folder.

    Raises:
        InvalidRequest: It was removed while it was looked at.
    """
    target = run_dir.path / PLACED
    target.mkdir()
    checkpoint = Path(model.location).parent
    try:
        for source in sorted(Path(model.location).iterdir()):
            if source.is_file() and not source.is_symlink():
                _link(source, target / source.name)
        whole = read.complete_manifest(RunDir(checkpoint.parent.parent), checkpoint.name) is not None
    except FileNotFoundError:
        whole = False
    if not whole:  # else every file was there all the time
        raise InvalidRequest(f"{model.name} was removed just now", code="model_not_found", param="model")
    sync_folder(target)
    return PLACED


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copyfile(source, target, follow_symlinks=False)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())


def _missing(message: str) -> NotFound:
    return NotFound(message, code="model_not_found", param="model")


def _loadable(checkpoint: Mapping[str, Any]) -> str | None:
    """The folder of a checkpoint that holds a whole model."""
    if checkpoint["kind"] == "full":
        return "model"
    merged = any(PurePosixPath(file["path"]).parts[0] == "merged" for file in checkpoint["files"])
    return "merged" if merged else None


def _view(name: str, job: Job, checkpoint: Mapping[str, Any]) -> ModelView:
    return ModelView(
        name, checkpoint["created_at"], job.owner, checkpoint["kind"],
        trainable=_loadable(checkpoint) is not None, job_uuid=job.job_uuid, checkpoint=checkpoint["id"],
    )  # fmt: skip
