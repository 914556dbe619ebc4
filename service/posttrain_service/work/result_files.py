"""The result file of an ended job: its metrics as CSV, in the list of files under an id made from the run's."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain_service.clock import Clock
from posttrain_service.domain.files import UploadedFile
from posttrain_service.domain.job import Job
from posttrain_service.errors import NotFound, ServiceError
from posttrain_service.runs import read
from posttrain_service.runs.blobs import Blobs
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.wire.openai_views import results_csv
from posttrain_trainer.contract.rundir import RunDir

log = logging.getLogger(__name__)

PURPOSE = "fine-tune-results"


def result_file_id(run_id: str) -> str:
    """Id of the run's result file, whether or not there is one yet."""
    return "file-" + run_id.replace("-", "")


@dataclass(frozen=True)
class ResultFiles:
    """Makes result files."""

    settings: Settings
    store: Store
    clock: Clock
    blobs: Blobs

    def make(self, job: Job) -> None:
        """Write the job's result file, in place of an earlier attempt's; nothing when it has no metrics.

        What keeps it from being written is logged: no job's end waits for its result file.
        """
        points = read.metrics(RunDir(self.settings.jobs_dir / job.run_id))
        if not points:
            return
        try:
            forget(self.store, job.run_id)
            blob = self.blobs.save(io.BytesIO(results_csv(points)), result_file_id(job.run_id))
            self.store.files.insert(
                UploadedFile(
                    id=blob.file_id,
                    owner=job.owner,
                    filename=f"results-{job.job_uuid}.csv",
                    purpose=PURPOSE,
                    size_bytes=blob.size_bytes,
                    sha256=blob.sha256,
                    created_at=self.clock.now(),
                )
            )
        except (ServiceError, OSError) as error:
            log.error("the result file of the job could not be written: %s", error)

    def of(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """run_id -> ids of the result files that are there."""
        ids = {job.run_id: result_file_id(job.run_id) for job in jobs}
        known = self.store.files.known(list(ids.values()))
        return {run_id: [file_id] if file_id in known else [] for run_id, file_id in ids.items()}


def forget(store: Store, run_id: str) -> None:
    """Remove the row of a run's result file, if there is one; its bytes are left to the caller.

    Raises:
        Conflict: An unended job uses the file.
    """
    try:
        store.files.delete(result_file_id(run_id))
    except NotFound:
        return
