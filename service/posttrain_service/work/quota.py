"""How much of the disk uploads and runs take up, by owner, and whether a newcomer may add to it."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from pathlib import Path

from posttrain_service.errors import QuotaExceeded
from posttrain_service.settings import Settings
from posttrain_service.store.store import Store

FRESH_S = 5.0
"""How long the sizes of runs that still grow stay good: measuring them is a walk over their folders."""


class Quota:
    """The quotas on storage; without any set, asking costs nothing."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._lock = threading.Lock()
        self._ended: dict[str, tuple[int, int]] = {}  # run id -> version and size: the folder of an ended job is at rest
        self._runs: Counter[str] = Counter()
        self._measured: float | None = None

    def check(self, owner: str, new_bytes: int = 0) -> None:
        """Refuse what would exceed a quota.

        Args:
            owner: Who wants to store something.
            new_bytes: How much; what is stored beside the row of it already counts, so give only what has no row yet.

        Raises:
            QuotaExceeded: The owner's share or the whole is used up; the message has the numbers.
        """
        total, own = self._settings.storage_quota_bytes, self._settings.owner_quota_bytes
        if total is None and own is None:
            return
        used = self.used()
        _check(f"owner {owner!r} has", used[owner] + new_bytes, own, "POSTTRAIN_OWNER_QUOTA_BYTES")
        _check("all owners together have", used.total() + new_bytes, total, "POSTTRAIN_STORAGE_QUOTA_BYTES")

    def used(self) -> Counter[str]:
        """Bytes of uploads and run folders by owner; runs as they were some seconds ago at most."""
        with self._lock:
            now = time.monotonic()
            if self._measured is None or now - self._measured >= FRESH_S:
                self._runs = self._measure()
                self._measured = time.monotonic()
            return self._runs + Counter(self._store.files.bytes_by_owner())

    def _measure(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        known: dict[str, tuple[int, int]] = {}
        for run_id, (owner, version) in self._store.jobs.owners().items():
            before = self._ended.get(run_id)
            size = before[1] if before is not None and before[0] == version else tree_bytes(self._settings.jobs_dir / run_id)
            if version >= 0:
                known[run_id] = (version, size)
            sizes[owner] += size
        self._ended = known
        return sizes


def tree_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; links are not followed, and what vanishes meanwhile counts as nothing."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                facts = (Path(parent) / name).lstat()
            except FileNotFoundError:
                continue
            size += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
    return size


def _check(who: str, used: int, quota: int | None, setting: str) -> None:
    if quota is not None and used >= quota:
        raise QuotaExceeded(
            f"{who} {used:,} bytes of uploads and runs, and {quota:,} is the quota; delete jobs or files, or raise {setting}",
            code="storage_quota_exceeded",
        )
