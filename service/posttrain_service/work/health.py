"""Whether the service can do its work, and what it is."""

from __future__ import annotations

import copy
import platform
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import posttrain_service
from posttrain_service.clock import Clock
from posttrain_service.errors import ServiceError
from posttrain_service.launch.tools import run_tool
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store
from posttrain_service.work.gauges import Gauges, exposition
from posttrain_service.work.loops import Loop
from posttrain_service.work.meters import Meters
from posttrain_trainer.contract import CONTRACT_VERSION

VERSION_TIMEOUT_S = 60.0


class Health:
    """See `HealthService`.

    Args:
        settings: Of the service.
        store: Asked for a write.
        is_schema_current: Asks the database.
        loops: Must be alive.
        slots: Names of all devices of this host.
        clock: What time it is.
        meters: What this process has counted.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        is_schema_current: Callable[[], bool],
        loops: Sequence[Loop],
        slots: Sequence[str],
        clock: Clock,
        meters: Meters,
    ) -> None:
        self._settings = settings
        self._store = store
        self._is_schema_current = is_schema_current
        self._loops = tuple(loops)
        self._gauges = Gauges(settings, store, clock, tuple(slots), self._loops)
        self._sees: str | None = None
        self.meters = meters
        self._trainer: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def seen_by(self, store: Store, owner: str | None) -> Health:
        """The same with the jobs that another view of the store has; None = everybody's."""
        view = copy.copy(self)
        view._store, view._sees = store, owner
        view._gauges = replace(self._gauges, store=store)
        return view

    def live(self) -> dict[str, Any]:
        """See `HealthService.live`."""
        return {"status": "ok", "version": posttrain_service.__version__}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """See `HealthService.ready`."""
        checks = {"store": self._store_fault(), "loops": self._loop_fault(), "disk": self._disk_fault()}
        bad = {name: fault for name, fault in checks.items() if fault is not None}
        shown = {name: fault or "ok" for name, fault in checks.items()}
        return not bad, {"status": "unavailable" if bad else "ok", "checks": shown}

    def version(self) -> dict[str, Any]:
        """See `HealthService.version`."""
        return {
            "version": posttrain_service.__version__,
            "contract": CONTRACT_VERSION,
            "python": platform.python_version(),
            "trainer": self._trainer_version(),
        }

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """See `HealthService.metrics`."""
        return exposition(self._gauges, self.meters if self._sees is None else None, accept)

    def _store_fault(self) -> str | None:
        try:
            self._store.check_writable()
            current = self._is_schema_current()
        except ServiceError as error:
            return error.message
        return None if current else "the database has another schema than this build; run `posttrain db upgrade`"

    def _loop_fault(self) -> str | None:
        dead = [loop for loop in self._loops if not loop.is_alive()]
        if not dead:
            return None
        return "; ".join(f"the {loop.name} has made no round for {loop.age_s():.0f} s" for loop in dead)

    def _disk_fault(self) -> str | None:
        free = shutil.disk_usage(self._settings.storage_dir).free
        reserve = self._settings.disk_reserve_bytes
        return None if free >= reserve else f"{free:,} bytes are free, and {reserve:,} must stay free"

    def _trainer_version(self) -> dict[str, Any]:
        """The trainer's own answer, asked for once; a trainer that cannot answer now is asked again next time."""
        with self._lock:
            if self._trainer is None:
                try:
                    self._trainer = run_tool(self._settings.trainer_python, "version", {}, VERSION_TIMEOUT_S)
                except ServiceError as error:
                    return {"error": error.message}
            return self._trainer
