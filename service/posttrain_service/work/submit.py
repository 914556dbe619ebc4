"""From a request to a stored, queued job. Everything is checked before anything is stored.

Order of writing: the run's folder first, the row last. The row is the promise; a folder without one is left over from
a crash and swept.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain_service import traces
from posttrain_service.clock import Clock
from posttrain_service.domain.job import Job, NewEvent, RetryPolicy
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.errors import Conflict, DiskFull, InvalidRequest
from posttrain_service.ids import is_file_id, new_run_id
from posttrain_service.settings import Settings
from posttrain_service.store.idempotency import IdempotencyKey
from posttrain_service.store.store import Store
from posttrain_service.work import rows
from posttrain_service.work.hints import Hints
from posttrain_service.work.made import Models, is_made, place_model
from posttrain_service.work.prepare import Prepared, prepare
from posttrain_service.work.quota import Quota
from posttrain_service.work.terms import Terms
from posttrain_service.work.uploads import check_key
from posttrain_service.work.webhooks import check_webhook
from posttrain_trainer.contract.rundir import RunDir, sync_folder, write_json

if TYPE_CHECKING:
    from posttrain_service.wire.jobs import InlineRows, JobRequest

CREATE = "jobs.create"
_OPTIMIZER_COPIES = 4  # weights, gradients are not saved; fp32 masters and two moments are, beside model/


@dataclass(frozen=True)
class Checked:
    """A request that could be run: what `prepare` found, and its rows."""

    prepared: Prepared
    train: rows.Source
    train_report: dict[str, Any]
    validation: rows.Source | None = None
    validation_report: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[tuple[str, rows.Source]]:
        """The sets by the stem of their file's name."""
        return [("train", self.train)] + ([] if self.validation is None else [("validation", self.validation)])


class Submitter:
    """Takes requests.

    Args:
        settings: Of the service.
        store: Where jobs and files are.
        clock: What time it is.
        hints: To wake the scheduler.
        checker: Checks rows.
        slots: Names of all devices of this host.
        models: Finds models.
        quota: What uploads and runs may take up.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        clock: Clock,
        hints: Hints,
        checker: rows.Checker,
        slots: Sequence[str],
        models: Models,
        quota: Quota,
    ) -> None:
        self.settings = settings
        self.models = models
        self.slots = tuple(slots)
        self._store = store
        self._clock = clock
        self._hints = hints
        self._checker = checker
        self._quota = quota

    def create(
        self, request: JobRequest, *, idempotency_key: str | None, owner: str, terms: Terms | None = None
    ) -> tuple[Job, bool]:
        """Queue the job, or find the one that the same request already made; see `JobService.create`."""
        key = self._key(request, idempotency_key, owner)
        if (known := self.known(request.job_uuid, request.digest(), key, owner)) is not None:
            return known, False
        checked = self.check(request, terms)
        stored, new = self.keep(checked, queued_events(checked), digest=request.digest(), key=key, owner=owner)
        if new:
            self._hints.scheduler.give()
        return stored, new

    def keep(
        self,
        checked: Checked,
        events: NewEvent | Sequence[NewEvent],
        *,
        digest: str,
        key: IdempotencyKey | None,
        owner: str,
        notes: Mapping[str, Any] | None = None,
    ) -> tuple[Job, bool]:
        """Store a new job with its folder, or find the one that the same request made meanwhile and leave no folder.

        Args:
            checked: What the job is made of.
            events: What is told of it first.
            digest: Of the request's meaning.
            key: To find the job again by.
            owner: Whose it is.
            notes: What its spec says besides.

        Raises:
            DiskFull: The disk is below its reserve.
            QuotaExceeded: The owner's share of the storage, or the whole, is used up.
            Conflict: The job_uuid is taken by another request.
        """
        self.check_disk(checked)
        run_id = new_run_id()
        run_dir = RunDir(self.settings.jobs_dir / run_id)
        try:
            data = place_all(checked, run_dir)
            job = self._make_job(checked, run_id, owner, data, digest)
            job = replace(job, spec=job.spec | dict(notes or {}) | _trace())
            write_json(run_dir.spec, {"run_id": run_id, "job_uuid": job.job_uuid, **job.spec})
            stored, new = self._store.jobs.insert(job, events, idempotency=key)
        except BaseException:
            if not self._store.jobs.exists(run_id):  # a lost answer may hide that it was stored
                shutil.rmtree(run_dir.path, ignore_errors=True)
            raise
        if not new:
            shutil.rmtree(run_dir.path)
        return stored, new

    def check(self, request: JobRequest, terms: Terms | None = None) -> Checked:
        """Check model, knobs, devices and every row of a request; nothing is stored.

        Raises:
            InvalidRequest: What cannot be used, by its name or line.
            PayloadTooLarge: More inline rows than allowed.
        """
        prepared = prepare(request, self.settings, self.slots, self.models.find(request.model))
        terms = terms or Terms()
        warnings = [*terms.warnings, *prepared.warnings, *check_webhook(request.webhook_url, self.settings)]
        train = self.source(request.dataset, "dataset")
        report = self._rows(prepared, train, "dataset", warnings, terms.unwanted)
        if request.validation_dataset is None:
            return Checked(prepared, train, report, warnings=warnings)
        validation = self.source(request.validation_dataset, "validation_dataset")
        validation_report = self._rows(prepared, validation, "validation_dataset", warnings, terms.unwanted)
        return Checked(prepared, train, report, validation, validation_report, warnings)

    def source(self, reference: str | InlineRows, param: str) -> rows.Source:
        """The rows that a request refers to.

        Raises:
            InvalidRequest: The file does not exist.
            PayloadTooLarge: More inline rows than allowed.
        """
        if not isinstance(reference, str):
            return rows.inline(reference.rows, self.settings.max_rows_inline)
        registered = None if is_file_id(reference) else self._store.datasets.get(reference)
        file_id = reference if registered is None else registered.file_id
        file = self._store.files.get(file_id) if is_file_id(file_id) else None
        path = self.settings.files_dir / file_id
        if file is None or not path.is_file():
            raise InvalidRequest(
                f"{param} is {reference[:140]!r}, and there is no such file or data set; upload it by POST /v1/files and give "
                'its id, or give {"rows": [...]}',
                code="file_not_found",
                param=param,
            )
        return rows.Source(path=path, filename=file.filename, file_id=file.id, sha256=file.sha256)

    def _rows(
        self, prepared: Prepared, source: rows.Source, param: str, warnings: list[str], unwanted: frozenset[str]
    ) -> dict[str, Any]:
        training = prepared.training
        report = self._checker.report(source, prepared.request.asked_method, training["train_on"])
        rows.refuse_shapes(report, param, unwanted)
        warnings += rows.refuse_bad_rows(
            report, param, skip=training["invalid_rows"] == "skip", max_invalid_rows=training["max_invalid_rows"]
        )
        return rows.report_json(report)

    def _key(self, request: JobRequest, key: str | None, owner: str) -> IdempotencyKey | None:
        if key is None:
            return None
        check_key(key)
        return IdempotencyKey(owner, CREATE, key, request.digest(), self.settings.idempotency_ttl_s)

    def known(self, job_uuid: str | None, digest: str, key: IdempotencyKey | None, owner: str) -> Job | None:
        """The job that this request made before, so that a repeat isn't refused for what has changed since.

        Raises:
            Conflict: The job_uuid is taken by another request.
        """
        if key is not None and (run_id := self._store.idempotency.find(key)) is not None:
            return self._store.jobs.get_run(run_id)  # None: it was deleted, which insert says
        if job_uuid is None or (job := self._store.jobs.get(job_uuid)) is None:
            return None
        if job.body_digest != digest or job.owner != owner:
            raise Conflict(
                f"job_uuid {job_uuid} is taken by a job with another request body; choose another one",
                code="job_exists",
                param="job_uuid",
            )
        return job if key is None else None  # with a key, insert finds the job and remembers the key

    def check_disk(self, checked: Checked) -> None:
        """See that there is room for a job, and warn where its checkpoints may outgrow it.

        Raises:
            DiskFull: The disk is below its reserve.
        """
        self.settings.jobs_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.settings.jobs_dir).free
        reserve = self.settings.disk_reserve_bytes
        if free < reserve:
            raise DiskFull(
                f"the storage directory has {free:,} bytes free, less than the reserve of {reserve:,}; delete old jobs or "
                "files, or lower POSTTRAIN_DISK_RESERVE_BYTES"
            )
        size = checked.prepared.model.size_bytes
        training = checked.prepared.training
        if size is None or training["lora"] is not None:
            return
        need = size * _OPTIMIZER_COPIES * (training["keep_last"] + training["keep_best"] + 1)
        if need > free - reserve:
            checked.warnings.append(
                f"checkpoints may need about {need:,} bytes, but only {free - reserve:,} are free; "
                "if the disk fills, the job stops with its last complete checkpoint"
            )

    def _make_job(self, checked: Checked, run_id: str, owner: str, data: dict[str, str], digest: str) -> Job:
        """The row of a new job, queued now.

        Raises:
            QuotaExceeded: The owner's share of the storage, or the whole, is used up.
        """
        self._quota.check(owner)
        request = checked.prepared.request
        now = self._clock.now()
        return Job(
            run_id=run_id,
            job_uuid=request.job_uuid or run_id,
            owner=owner,
            state=JobState.QUEUED,
            method=request.asked_method.kind,
            model=request.model,
            spec=make_spec(checked, data),
            body_digest=digest,
            created_at=now,
            name=request.name,
            warnings=checked.warnings,
            priority=request.resources.priority,
            metadata=dict(request.metadata),
            file_ids=[source.file_id for _, source in checked.sources if source.file_id is not None],
            deadline_at=now + self.settings.queue_ttl_s,
            devices_wanted=request.devices,
            max_duration_s=request.resources.max_duration_s,
            ttl_s=request.retention.ttl_s,
            keep=request.retention.keep,
            retry=_retry(request),
        )


def _trace() -> dict[str, str]:
    """The trace that the request belongs to, for the job to go on with."""
    context = traces.current()
    return {} if context is None else {traces.TRACE: context}


def _retry(request: JobRequest) -> RetryPolicy:
    if request.retry is None:
        return RetryPolicy()
    return RetryPolicy(request.retry.max_attempts, tuple(str(reason) for reason in request.retry.on))


def make_spec(checked: Checked, data: dict[str, str]) -> dict[str, Any]:
    """The resolved request as it is stored and shown: every knob, no server path; `asked` is what the caller wrote of it."""
    prepared, request = checked.prepared, checked.prepared.request
    return {
        "asked": request.model_dump(mode="json", exclude_unset=True, exclude={"dataset", "validation_dataset"}),
        "model": request.model,
        "method": request.asked_method.model_dump(mode="json"),
        "dataset": checked.train.reference() | {"report": _summary(checked.train_report)},
        "validation_dataset": None
        if checked.validation is None
        else checked.validation.reference() | {"report": _summary(checked.validation_report)},
        "training": prepared.training,
        "torchrun": prepared.torchrun,
        "resources": request.resources.model_dump(mode="json") | {"devices": request.devices},
        "retention": request.retention.model_dump(mode="json"),
        "retry": None if request.retry is None else request.retry.model_dump(mode="json"),
        "webhook_url": request.webhook_url,
        "data": data,
    }


def place_all(checked: Checked, run_dir: RunDir) -> dict[str, str]:
    """Make the run's folder with its rows; paths of the sets, relative to the folder."""
    run_dir.data.mkdir(parents=True)
    data = {stem: f"data/{rows.place(source, run_dir.data, stem)}" for stem, source in checked.sources}
    if is_made(checked.prepared.model.name):
        data["model"] = place_model(checked.prepared.model, run_dir)
    sync_folder(run_dir.path)
    sync_folder(Path(run_dir.path).parent)
    return data


def _summary(report: dict[str, Any] | None) -> dict[str, Any]:
    assert report is not None
    return {key: report[key] for key in ("rows", "format", "num_errors")}


def queued_events(checked: Checked) -> list[NewEvent]:
    """What is told when a job whose rows are good is queued."""
    rows_found = checked.train_report["rows"]
    events = [NewEvent("queued", f"the job is queued; its data set has {rows_found} rows", data={"rows": rows_found})]
    return events + [NewEvent("warning", warning, level="warn") for warning in checked.warnings]
