"""What this process has counted and timed for Prometheus: moves of jobs, requests, rounds of the loops, lag.

Labels have few values: states, reasons, loops and route templates, never an id that a caller chose. With several server
processes and PROMETHEUS_MULTIPROC_DIR set they add up over all of them; without it each tells its own.
"""

from __future__ import annotations

import math
import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector

from posttrain_service.domain.job import Moved
from posttrain_service.domain.lifecycle import REASON_STATE, TERMINAL, JobState

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of prometheus-client: a folder in which the processes of one server put their numbers together."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

disable_created_metrics()  # type: ignore[no-untyped-call]  # a further series beside each one, with the time of its making; the process's start tells the same

_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0, 7 * 86400.0)
_START = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Meters:
    """Counters and histograms of one server process."""

    def __init__(self) -> None:
        self._own = own = CollectorRegistry()
        self._submitted = Counter("posttrain_jobs_submitted", "Jobs that were stored.", registry=own)
        self._ended = Counter(
            "posttrain_jobs_ended", "Jobs that came to an end, by its state and reason.", ["state", "reason"], registry=own
        )
        self._retried = Counter(
            "posttrain_attempts_retried", "Attempts that failed and were followed by another one at once.", registry=own
        )
        self._waited = Histogram(
            "posttrain_queue_wait_seconds", "From being queued to the launch.", buckets=_LONG, registry=own
        )
        self._launched = Histogram(
            "posttrain_launch_seconds", "From the launch until the attempt's lock confirmed it.", buckets=_START, registry=own
        )
        self._ran = Histogram(
            "posttrain_attempt_seconds", "Length of an attempt that ran, by what the job became.", ["state"], buckets=_LONG, registry=own
        )
        self._requests = Histogram(
            "posttrain_http_request_seconds", "From a request to the beginning of its answer (streams go on long after it).",
            ["method", "route", "status"], buckets=_QUICK, registry=own,
        )  # fmt: skip
        self.open = Gauge(
            "posttrain_http_requests_open", "Requests that are being answered, streams among them.", registry=own, multiprocess_mode="livesum"
        )
        self._lag = Histogram(
            "posttrain_event_loop_lag_seconds", "How much later than planned the event loop woke a sleeper.", buckets=_QUICK, registry=own
        )
        self._rounds = Histogram("posttrain_loop_round_seconds", "Length of a loop's round.", ["loop"], buckets=_QUICK, registry=own)
        self._failures = Counter("posttrain_loop_failures", "Rounds of a loop that raised.", ["loop"], registry=own)
        for reason, state in REASON_STATE.items():  # from the first scrape on, so that the first end is a rise
            if state in TERMINAL:
                self._ended.labels(state, reason)

    def moved(self, move: Moved) -> None:
        """Count a job that was stored or moved."""
        job, to = move.job, move.job.state
        if move.source is None:
            self._submitted.inc()
            return
        if move.via is JobState.FAILED:
            self._retried.inc()
        if to in TERMINAL:
            self._ended.labels(to, job.reason or "none").inc()
        if to is JobState.LAUNCHING:
            self._waited.observe(max(0.0, job.moved_at - move.since))
        elif move.source is JobState.LAUNCHING and to is JobState.RUNNING:
            self._launched.observe(max(0.0, job.moved_at - move.since))
        if move.source in (JobState.RUNNING, JobState.STOPPING) and to is not JobState.STOPPING and job.started_at is not None:
            self._ran.labels(to).observe(max(0.0, job.moved_at - job.started_at))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request whose answer began; `route` is the template of its path, or "" when no route matched."""
        self._requests.labels(method if method in METHODS else "other", route or "none", str(status)).observe(seconds)

    def lag(self, seconds: float) -> None:
        """Note how late the event loop was."""
        self._lag.observe(seconds)

    def round(self, loop: str, seconds: float, failed: bool) -> None:
        """Note a round of a loop."""
        self._rounds.labels(loop).observe(seconds)
        if failed:
            self._failures.labels(loop).inc()

    def add_to(self, registry: CollectorRegistry) -> None:
        """Have everything counted so far, in this process or in all of this server's, be told by `registry` too."""
        if os.environ.get(MULTIPROC):
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return
        registry.register(self._own)
        ProcessCollector(registry=registry)
        GCCollector(registry)


def number(value: object) -> float | None:
    """The value as a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
