"""Jobs whose rows are checked after they were accepted: the accepting, and the loop that checks.

What can be told without reading rows (model, knobs, devices, that the files exist) is refused at once. Then the job is
stored and answered for, queued but held back; the loop reads its rows, chooses the values that depend on their number,
and lets it go, or ends it with the bad lines. A server that is killed in between goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain_service.clock import Clock
from posttrain_service.domain.checking import CHECK, is_checking
from posttrain_service.domain.deadlines import Limits, on_entry
from posttrain_service.domain.job import Job, NewEvent
from posttrain_service.domain.lifecycle import EndReason, JobState
from posttrain_service.errors import InvalidRequest, PayloadTooLarge
from posttrain_service.logs import log_context
from posttrain_service.settings import Settings
from posttrain_service.store.idempotency import IdempotencyKey
from posttrain_service.store.leases import Lease
from posttrain_service.store.store import Store
from posttrain_service.traces import TRACE
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.wire.openai_request import resolve_auto
from posttrain_service.wire.openai_views import bad_lines
from posttrain_service.work import models, rows
from posttrain_service.work.hints import Hints
from posttrain_service.work.leader import Leader
from posttrain_service.work.models import Model
from posttrain_service.work.prepare import prepare
from posttrain_service.work.submit import CREATE, Checked, Submitter, make_spec, queued_events
from posttrain_service.work.uploads import check_key
from posttrain_service.work.webhooks import check_webhook
from posttrain_trainer.contract.rowreport import RowReport
from posttrain_trainer.contract.rundir import RunDir, write_json

if TYPE_CHECKING:
    from posttrain_service.wire.openai_request import Asked

log = logging.getLogger(__name__)

FILES = ("training_file", "validation_file")
"""Names of the two data sets where requests are of this kind."""
MAX_LINE_EVENTS = 20
"""Most bad lines that are told as events; the error has more."""
_UNREAD: dict[str, Any] = {"rows": None, "format": None, "num_errors": None}


@dataclass(frozen=True)
class Validator:
    """Accepts jobs before their rows are read, and reads them afterwards."""

    settings: Settings
    store: Store
    clock: Clock
    hints: Hints
    leader: Leader
    submitter: Submitter
    checker: rows.Checker

    def accept(self, asked: Asked, *, idempotency_key: str | None, owner: str) -> tuple[Job, bool]:
        """Store the job with its rows unread, or find the one that the same request already made.

        Raises:
            InvalidRequest: A model, a knob, a device or a file that cannot be used.
            Conflict: The job_uuid is taken by another request.
            DiskFull: The disk is below its reserve.
        """
        request, digest = asked.request, _digest(asked)
        key = None
        if idempotency_key is not None:
            key = IdempotencyKey(owner, CREATE, check_key(idempotency_key), digest, self.settings.idempotency_ttl_s)
        if (known := self.submitter.known(request.job_uuid, digest, key, owner)) is not None:
            return known, False
        body = request.model_dump(mode="json", exclude_unset=True)
        stored, new = self.submitter.keep(
            self._unread(asked),
            NewEvent("validating", "the job is accepted; its files are being checked"),
            digest=digest,
            key=key,
            owner=owner,
            notes={CHECK: {"request": body, "auto": list(asked.auto)}},
        )
        if new:
            self.hints.validator.give()
        return stored, new

    def round(self) -> None:
        """Check the rows of every job that waits for it."""
        lease = self.leader.lease()
        if lease is None:
            return
        for job in self.store.jobs.queued():
            if is_checking(job):
                with log_context(job=job.job_uuid):
                    self._check(job, lease)

    def _check(self, job: Job, lease: Lease) -> None:
        try:
            checked = self._read(job)
        except (InvalidRequest, PayloadTooLarge) as error:
            self._fail(job, error, lease)
            return
        except OSError:
            log.exception("the rows of the job cannot be read now; the next round tries again")
            return
        spec = make_spec(checked, job.spec["data"]) | {key: job.spec[key] for key in (TRACE,) if key in job.spec}
        run_dir = RunDir(self.settings.jobs_dir / job.run_id)
        write_json(run_dir.spec, {"run_id": job.run_id, "job_uuid": job.job_uuid, **spec})
        told = len(job.warnings)
        changed = self.store.jobs.update(
            job.run_id,
            {"spec": spec, "warnings": checked.warnings},
            expected={JobState.QUEUED},
            event=queued_events(replace(checked, warnings=checked.warnings[told:])),
            fence=lease,
        )
        if changed is not None:
            self.hints.scheduler.give()

    def _unread(self, asked: Asked) -> Checked:
        request = asked.request
        prepared = prepare(request, self.settings, self.submitter.slots, self.submitter.models.find(request.model))
        train = self.submitter.source(request.dataset, FILES[0])
        validation = None
        if request.validation_dataset is not None:
            validation = self.submitter.source(request.validation_dataset, FILES[1])
        warnings = [*prepared.warnings, *check_webhook(request.webhook_url, self.settings), *asked.warnings]
        return Checked(prepared, train, _UNREAD, validation, _UNREAD if validation else None, warnings)

    def _read(self, job: Job) -> Checked:
        """The job's request with every value chosen, its rows found good."""
        check = job.spec[CHECK]
        asked = JobRequest.model_validate(check["request"])
        wanted = asked.asked_method, asked.training_knob("train_on")
        train = self._placed(job, "train", "dataset")
        validation = None if job.spec["validation_dataset"] is None else self._placed(job, "validation", "validation_dataset")
        report = self.checker.report(train, *wanted)
        request = resolve_auto(check["request"], tuple(check["auto"]), report.rows - report.num_errors)
        prepared = prepare(request, self.settings, self.submitter.slots, self._model(job))
        training = prepared.training
        warnings = [*job.warnings, *_judged(report, FILES[0], training)]
        validation_report = None
        if validation is not None:
            found = self.checker.report(validation, *wanted)
            warnings += _judged(found, FILES[1], training)
            validation_report = rows.report_json(found)
        return Checked(prepared, train, rows.report_json(report), validation, validation_report, warnings)

    def _model(self, job: Job) -> Model:
        """The model, which the run keeps itself where another job made it."""
        placed = job.spec["data"].get("model")
        if placed is None:
            return self.submitter.models.find(job.model)
        run_dir = RunDir(self.settings.jobs_dir / job.run_id)
        return models.at(job.model, run_dir.path / placed, run_dir.path)

    def _placed(self, job: Job, stem: str, name: str) -> rows.Source:
        """The rows as they lie in the run's folder, which no deletion of the upload reaches."""
        reference = job.spec[name]
        path = self.settings.jobs_dir / job.run_id / job.spec["data"][stem]
        return rows.Source(
            path=path, filename=reference["filename"], file_id=reference["file"], sha256=reference["sha256"]
        )

    def _fail(self, job: Job, error: InvalidRequest | PayloadTooLarge, lease: Lease) -> None:
        reason = _reason(error)
        lines = error.errors if reason is EndReason.INVALID_DATA else []
        message = error.message + (f". Bad lines: {bad_lines(lines)}" if lines else "")
        record: dict[str, Any] = {"code": str(reason), "message": message, "rank": None, "log_tail": None, "param": error.param}
        record |= {"errors": lines} if lines else {}
        entry = on_entry(job, JobState.FAILED, self.clock.now(), Limits.of(self.settings))
        self.store.jobs.move(
            job.run_id,
            {JobState.QUEUED},
            JobState.FAILED,
            event=[*_line_events(lines, error.param), NewEvent("failed", error.message, "error", {"reason": str(reason)})],
            changes=entry | {"reason": reason, "error": record},
            expected_attempt=job.attempt,
            fence=lease,
        )


def _judged(report: RowReport, param: str, training: dict[str, Any]) -> list[str]:
    skip = training["invalid_rows"] == "skip"
    return rows.refuse_bad_rows(report, param, skip=skip, max_invalid_rows=training["max_invalid_rows"])


def _line_events(lines: Sequence[dict[str, Any]], param: str | None) -> list[NewEvent]:
    return [
        NewEvent("invalid_row", f"{param}, line {line['line']}: {line['message']}", "error", {"line": line["line"]})
        for line in lines[:MAX_LINE_EVENTS]
    ]


def _reason(error: InvalidRequest | PayloadTooLarge) -> EndReason:
    if error.code == "invalid_data":
        return EndReason.INVALID_DATA
    return EndReason.MODEL_NOT_FOUND if error.param == "model" else EndReason.INVALID_ARGUMENTS


def _digest(asked: Asked) -> str:
    text = json.dumps([asked.request.digest(), list(asked.auto)])
    return hashlib.sha256(text.encode()).hexdigest()
