"""What a scrape reads: the queue, the jobs that live, devices, disk and loops, as they are now.

Its cost does not grow with the jobs that have ended: counts come from an index over the others, and of the live jobs at
most MAX_JOBS are told one by one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import posttrain_service
from posttrain_service.clock import Clock
from posttrain_service.domain.job import Job
from posttrain_service.domain.lifecycle import LIVE
from posttrain_service.runs import read
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work.loops import Loop
from posttrain_service.work.meters import Meters, number
from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.rundir import RunDir

MAX_JOBS = 50
"""Most live jobs with values of their own, the newest first."""

_POINT = {
    "loss": ("posttrain_job_loss", "Loss of a live job's newest step."),
    "learning_rate": ("posttrain_job_learning_rate", "Learning rate of a live job's newest step."),
    "step_time_s": ("posttrain_job_step_seconds", "Wall time of a live job's newest step."),
    "tokens_per_s": ("posttrain_job_tokens_per_second", "Tokens a second of a live job's newest step, over all its ranks."),
    "memory_bytes": ("posttrain_job_memory_bytes", "Peak memory of a live job's first rank."),
    "validation_loss": ("posttrain_job_validation_loss", "Validation loss of a live job, where its newest step had one."),
}
_BEAT = {
    "step": ("posttrain_job_step", "Optimizer steps that a live job has done."),
    "total_steps": ("posttrain_job_total_steps", "Optimizer steps that a live job will do in all."),
    "eta_s": ("posttrain_job_eta_seconds", "Estimated time to a live job's last step."),
}


@dataclass(frozen=True)
class Gauges(Collector):
    """Reads them anew for each scrape.

    Args:
        settings: Of the service.
        store: As the caller sees it.
        clock: What time it is.
        slots: Names of all devices of this host.
        loops: The loops of this process.
    """

    settings: Settings
    store: Store
    clock: Clock
    slots: Sequence[str]
    loops: Sequence[Loop]

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield _labelled(
            "posttrain_build_info", "Versions, as labels.", ["version", "contract"], [((posttrain_service.__version__, str(CONTRACT_VERSION)), 1.0)]
        )
        yield from self._queue()
        yield from self._host()
        yield from self._live()

    def _queue(self) -> Iterator[Metric]:
        jobs = self.store.jobs.count_unended()
        yield _labelled("posttrain_jobs", "Jobs that have not ended, by state.", ["state"], [((s,), n) for s, n in jobs.items()])
        since = self.store.jobs.queued_since()
        waits = 0.0 if since is None else max(0.0, self.clock.now() - since)
        yield GaugeMetricFamily("posttrain_queue_oldest_seconds", "How long the oldest queued job waits; 0 for an empty queue.", waits)

    def _host(self) -> Iterator[Metric]:
        taken = {slot.device for slot in self.store.slots.taken()}
        yield GaugeMetricFamily("posttrain_devices", "Devices to train on.", len(self.slots))
        yield GaugeMetricFamily("posttrain_devices_busy", "Devices that a job holds.", len(taken.intersection(self.slots)))
        free = shutil.disk_usage(self.settings.storage_dir).free
        yield GaugeMetricFamily("posttrain_disk_free_bytes", "Free space of the storage folder's disk.", free)
        reserve = self.settings.disk_reserve_bytes
        yield GaugeMetricFamily("posttrain_disk_reserve_bytes", "Free space below which nothing is launched.", reserve)
        ages = [((loop.name,), loop.age_s()) for loop in self.loops]
        yield _labelled("posttrain_loop_age_seconds", "Time since a loop's last round that ended well, in this process.", ["loop"], ages)

    def _live(self) -> Iterator[Metric]:
        page = self.store.jobs.page(limit=MAX_JOBS, status=sorted(LIVE))
        runs = [(job, RunDir(self.settings.jobs_dir / job.run_id)) for job in page.data]
        points = [(job, read.latest(run) or {}) for job, run in runs]
        beats = [(job, read.progress(run, job.attempt) or {}) for job, run in runs]
        for key, (name, text) in _POINT.items():
            yield _of_jobs(name, text, points, lambda point, key=key: point.get(key))  # type: ignore[misc]
        for key, (name, text) in _BEAT.items():
            yield _of_jobs(name, text, beats, lambda beat, key=key: beat.get(key))  # type: ignore[misc]
        now = self.clock.now()
        age = "Time since a live job's newest sign of progress."
        yield _of_jobs("posttrain_job_heartbeat_age_seconds", age, beats, lambda beat: _age(beat.get("time"), now))


def exposition(gauges: Gauges, meters: Meters | None, accept: str) -> tuple[bytes, str]:
    """What a scrape is answered, and its content type.

    Args:
        gauges: As the caller sees them.
        meters: What the process counted; None for a caller who doesn't see everybody's jobs.
        accept: The request's Accept header: OpenMetrics where it asks for that, else Prometheus' text format.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(gauges)
    if meters is not None:
        meters.add_to(registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _labelled(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric(list(key), value)
    return family


def _of_jobs(name: str, text: str, records: Iterable[tuple[Job, dict[str, Any]]], value: Callable[[dict[str, Any]], object]) -> Metric:
    found = [((job.job_uuid,), number(value(record))) for job, record in records]
    return _labelled(name, text, ["job_uuid"], [(key, known) for key, known in found if known is not None])


def _age(then: object, now: float) -> float | None:
    known = number(then)
    return None if known is None else max(0.0, now - known)
