"""What a job's processes use now, found by the marker they carry."""

from __future__ import annotations

import threading
import time
from typing import Any

import psutil

from posttrain_trainer.contract import proc

_FRESH_S = 1.0


class Usage:
    """Looks at the processes of runs; an answer stays good for a second, however many ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[float, dict[str, Any]]] = {}

    def of(self, run_id: str, attempt: int) -> dict[str, Any]:
        """num_processes, rss_bytes (shared pages count in each process) and cpu_percent (mean since each began; 100 = one core)."""
        now = time.monotonic()
        with self._lock:
            self._known = {key: entry for key, entry in self._known.items() if now - entry[0] < _FRESH_S}
            if (run_id, attempt) not in self._known:
                self._known[run_id, attempt] = now, _look(run_id, attempt)
            return self._known[run_id, attempt][1]


def _look(run_id: str, attempt: int) -> dict[str, Any]:
    rss_bytes, cpu, num_processes = 0, 0.0, 0
    for identity in proc.find(run_id, attempt):
        try:
            process = psutil.Process(identity.pid)
            times = process.cpu_times()
            age_s = max(1e-3, time.time() - process.create_time())
            rss_bytes += process.memory_info().rss
        except psutil.Error:
            continue  # it ended meanwhile
        cpu += 100.0 * (times.user + times.system) / age_s
        num_processes += 1
    return {"num_processes": num_processes, "rss_bytes": rss_bytes, "cpu_percent": round(cpu, 1)}
