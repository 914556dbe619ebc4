"""The service's composition root: settings -> store, backend, use cases and loops. The only place that knows every part."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

from sqlalchemy import Engine, inspect

from posttrain_service.clock import Clock, SystemClock
from posttrain_service.domain.keys import DEFAULT_OWNER, Caller
from posttrain_service.errors import Conflict, InvalidSettings, StoreMismatch
from posttrain_service.launch.backend import LaunchBackend
from posttrain_service.launch.registry import backend as make_backend
from posttrain_service.runs.blobs import Blobs
from posttrain_service.settings import Settings, unknown_variables
from posttrain_service.store.engine import make_engine
from posttrain_service.store.store import Store
from posttrain_service.store.upgrade import is_current, upgrade
from posttrain_service.traces import Traces
from posttrain_service.traces import make as make_traces
from posttrain_service.work import inventory
from posttrain_service.work.access import Access
from posttrain_service.work.datasets import Datasets
from posttrain_service.work.dryrun import DryRun
from posttrain_service.work.health import Health
from posttrain_service.work.hints import Hints
from posttrain_service.work.jobs import Jobs
from posttrain_service.work.leader import Leader
from posttrain_service.work.loops import Loop
from posttrain_service.work.made import Models
from posttrain_service.work.meters import Meters
from posttrain_service.work.moves import Moves
from posttrain_service.work.parts import Parts
from posttrain_service.work.quota import Quota
from posttrain_service.work.registry import Registry
from posttrain_service.work.result_files import ResultFiles
from posttrain_service.work.rows import Checker
from posttrain_service.work.scheduler import Scheduler
from posttrain_service.work.services import Services
from posttrain_service.work.streams import Streams
from posttrain_service.work.submit import Submitter
from posttrain_service.work.supervisor import Supervisor
from posttrain_service.work.sweeper import Sweeper
from posttrain_service.work.uploads import Uploads
from posttrain_service.work.usage import Usage
from posttrain_service.work.validator import Validator
from posttrain_service.work.verbs import Verbs
from posttrain_service.work.webhooks import Webhooks

log = logging.getLogger(__name__)

STOP_JOBS_MARGIN_S = 15.0
LOOPS_STOP_S = 5.0
SCHEDULER = "scheduler"
_POLL_S = 0.1
_SQLITE_FILE = "sqlite:///"


@dataclass(frozen=True)
class Runtime:
    """One running service: its use cases and its loops."""

    settings: Settings
    services: Services
    store: Store
    loops: Sequence[Loop]
    sweeper: Sweeper
    hints: Hints
    leader: Leader
    verbs: Verbs

    def start(self) -> None:
        """Start the loops; the supervisor's first round adopts the jobs that still run."""
        for loop in self.loops:
            loop.start()

    def stop(self, *, stop_jobs: bool = False) -> None:
        """End streams and loops. Jobs run on, unless `stop_jobs`: then live ones are cancelled first; queued ones stay.

        A stopped runtime is not started again: build another.
        """
        self.services.streams.close()
        if stop_jobs:
            self._stop_jobs()
        for loop in self.loops:
            loop.ask_to_stop()
        deadline = time.monotonic() + LOOPS_STOP_S
        for loop in self.loops:
            if not loop.stop(max(0.0, deadline - time.monotonic())):
                log.warning("the %s is still in a round; it ends with the process", loop.name)
        self.leader.release()
        self.store.close()
        if self.services.traces is not None:
            self.services.traces.close()

    def _stop_jobs(self) -> None:
        for loop in self.loops:
            if loop.name == SCHEDULER:
                loop.stop()  # or it would launch the next job as soon as one is stopped
        for job in self.store.jobs.live():
            try:
                self.verbs.cancel(job.job_uuid)
            except Conflict as error:  # it ended meanwhile
                log.info("%s", error.message)
        limit_s = self.settings.stop_grace_s + STOP_JOBS_MARGIN_S
        deadline = time.monotonic() + limit_s
        while (live := self.store.jobs.live()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if live:
            left = ", ".join(job.job_uuid for job in live)
            log.error("these jobs have not ended within %g s and run on: %s", limit_s, left)


def build(
    settings: Settings,
    *,
    backend: LaunchBackend | None = None,
    clock: Clock | None = None,
    slots: Sequence[str] | None = None,
) -> Runtime:
    """Everything a server process needs, ready to start.

    Args:
        settings: Of the service.
        backend: How attempts are launched; None = on this host.
        clock: What time it is; None = the host's.
        slots: Names of the devices to train on; None = what this host has.

    Raises:
        InvalidSettings: A folder that can't be used, or a setting that can't be honoured.
        StoreMismatch: The database has another schema, and it isn't the embedded one that is upgraded on start.
    """
    for name in unknown_variables(os.environ):
        log.warning("the variable %s is set, but nothing reads it: is it misspelt?", name)
    _make_folders(settings)
    clock = clock or SystemClock()
    engine = make_engine(settings.effective_database_url, busy_timeout_s=settings.database_busy_timeout_s)
    _check_schema(engine)
    meters, traces = Meters(), make_traces(settings.traces)
    store = Store(engine, clock, busy_timeout_s=settings.database_busy_timeout_s, on_move=Moves(meters, traces).told)
    pool = tuple(_slots(settings) if slots is None else slots)
    watch = _Watch(meters, traces)
    return _assemble(settings, engine, store, clock, backend or make_backend("local", settings), pool, watch)


def _assemble(
    settings: Settings, engine: Engine, store: Store, clock: Clock, backend: LaunchBackend, slots: Sequence[str], watch: _Watch
) -> Runtime:
    hints, meters = Hints(), watch.meters
    leader = Leader(
        store, settings.storage_dir, settings.lease_ttl_s, one_host=engine.dialect.name == "sqlite"
    )
    blobs = Blobs(
        settings.files_dir, max_bytes=settings.max_upload_bytes, reserve_bytes=settings.disk_reserve_bytes
    )
    shared = _Shared(settings, store, clock, hints, leader, backend, tuple(slots), blobs, Quota(settings, store), watch)
    verbs = Verbs(settings, store, clock, hints)
    sweeper = Sweeper(settings, store, clock, blobs, leader)
    scheduler = Scheduler(settings, store, backend, clock, hints, leader, slots)
    supervisor = Supervisor(settings, store, backend, clock, hints, leader, shared.results)
    webhooks = Webhooks(settings, store, clock, leader)
    validator = shared.validator(store, shared.submitter(store))
    loops = (
        Loop("supervisor", supervisor.round, hints.supervisor, settings.supervise_interval_s, meters.round),
        Loop(SCHEDULER, scheduler.round, hints.scheduler, settings.supervise_interval_s, meters.round),
        Loop("sweeper", sweeper.round, hints.sweeper, settings.sweep_interval_s, meters.round),
        Loop("webhooks", webhooks.round, hints.webhooks, settings.supervise_interval_s, meters.round),
        Loop("validator", validator.round, hints.validator, settings.supervise_interval_s, meters.round),
    )
    health = Health(settings, store, partial(is_current, engine), loops, slots, clock, meters)
    services = _views(shared, health)(_EVERYBODY)
    return Runtime(settings, services, store, loops, sweeper, hints, leader, verbs)


_EVERYBODY = Caller(DEFAULT_OWNER, "admin")
"""Who calls a server without keys."""


@dataclass(frozen=True)
class _Watch:
    """Those who are told what happens."""

    meters: Meters
    traces: Traces | None


@dataclass(frozen=True)
class _Shared:
    """What the use cases of all callers share."""

    settings: Settings
    store: Store
    clock: Clock
    hints: Hints
    leader: Leader
    backend: LaunchBackend
    slots: tuple[str, ...]
    blobs: Blobs
    quota: Quota
    watch: _Watch

    @cached_property
    def checker(self) -> Checker:
        return Checker(self.settings.max_upload_bytes)

    @cached_property
    def results(self) -> ResultFiles:
        return ResultFiles(self.settings, self.store, self.clock, self.blobs)

    @cached_property
    def streams(self) -> Streams:
        return Streams(self.settings, self.store)

    @cached_property
    def usage(self) -> Usage:
        return Usage()

    def submitter(self, store: Store) -> Submitter:
        models = Models(self.settings, store)
        return Submitter(self.settings, store, self.clock, self.hints, self.checker, self.slots, models, self.quota)

    def validator(self, store: Store, submitter: Submitter) -> Validator:
        return Validator(self.settings, store, self.clock, self.hints, self.leader, submitter, self.checker)


def _views(shared: _Shared, health: Health) -> Callable[[Caller], Services]:
    """Makes the use cases for a caller: all of them over the store as that caller sees it."""
    settings, clock = shared.settings, shared.clock

    def make(caller: Caller) -> Services:
        store = shared.store.seen_by(caller.sees)
        submitter = shared.submitter(store)
        dry_run = DryRun(settings, submitter, shared.backend, shared.slots)
        uploads = Uploads(settings, store, clock, shared.blobs, shared.quota, caller.owner)
        return Services(
            jobs=Jobs(
                settings, store, submitter, Verbs(settings, store, clock, shared.hints), dry_run,
                shared.validator(store, submitter), shared.results, shared.usage, caller.owner,
            ),
            files=uploads,
            datasets=Datasets(settings, submitter, shared.checker),
            models=submitter.models,
            streams=shared.streams.seen_by(store),
            health=health.seen_by(store, caller.sees),
            settings=settings,
            parts=Parts(settings, clock, uploads, caller.sees),
            access=access,
            registry=Registry(settings, store, clock, uploads),
            meters=shared.watch.meters,
            traces=shared.watch.traces,
        )  # fmt: skip

    view = lru_cache(maxsize=256)(make)
    access = Access(shared.store, not settings.is_loopback, view)
    return view


def has_keys(settings: Settings) -> bool:
    """Whether somebody could call this server with a key. Makes nothing: a database that isn't there has none."""
    url = settings.effective_database_url
    if url.startswith(_SQLITE_FILE) and not Path(url.removeprefix(_SQLITE_FILE)).is_file():
        return False
    engine = make_engine(url, busy_timeout_s=settings.database_busy_timeout_s)
    store = Store(engine)
    try:
        with store.database.read() as connection:
            known = inspect(connection).has_table("api_keys")
        return known and any(key.revoked_at is None for key in store.keys.all())
    finally:
        store.close()


def _make_folders(settings: Settings) -> None:
    for folder in (settings.storage_dir, settings.jobs_dir, settings.files_dir, settings.base_models_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSettings(f"the folder {folder} cannot be made: {error.strerror}; set POSTTRAIN_STORAGE_DIR") from error


def _check_schema(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        if upgrade(engine):
            log.info("the database schema was brought up to date")
    elif not is_current(engine):
        raise StoreMismatch("the database has another schema than this build; run `posttrain db upgrade` first")


def _slots(settings: Settings) -> list[str]:
    try:
        return inventory.devices(settings.cpu_slots)
    except ValueError as error:
        raise InvalidSettings(str(error)) from error
