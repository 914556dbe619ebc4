"""One acting server process: a lock file on this host, and a database lease with a fencing token between hosts.

The lock file is freed by the kernel when its holder dies, so a server that was killed is succeeded at once; without it
the successor would wait until the lease has run out.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
import uuid
from pathlib import Path

from posttrain_service.store.leases import SCHEDULER, Lease
from posttrain_service.store.store import Store
from posttrain_trainer.contract.locks import Lock, LockHeld

LEADER_LOCK = "leader.lock"
"""Name of the lock file in the storage directory; held by the acting server, and by a restore instead of one."""


class Leader:
    """Asks for the lead, keeps it, and says whether this process has it.

    Args:
        store: Where the lease is.
        storage_dir: Where the lock file is.
        ttl_s: How long the lease holds without being renewed.
        one_host: Whether the database can only be used from this host (SQLite), so that the lock file alone proves that
            an earlier holder is gone.
    """

    def __init__(self, store: Store, storage_dir: Path, ttl_s: float, *, one_host: bool) -> None:
        self._store = store
        self._lock_path = storage_dir / LEADER_LOCK
        self._ttl_s = ttl_s
        self._one_host = one_host
        self._place = hashlib.sha256(f"{socket.gethostname()}:{storage_dir}".encode()).hexdigest()[:16]
        self._holder = f"{self._place}-{uuid.uuid4().hex}"
        self._mutex = threading.Lock()
        self._lock: Lock | None = None
        self._lease: Lease | None = None
        self._renewed = 0.0

    def lease(self) -> Lease | None:
        """The lease that fences this process's writes; None while another process has the lead."""
        with self._mutex:
            if not self._has_lock():
                return None
            age_s = time.monotonic() - self._renewed
            if self._lease is None or age_s > self._ttl_s / 3:
                self._lease = self._acquire()
                self._renewed = time.monotonic()
            return self._lease

    def release(self) -> None:
        """Give the lead up, so that another process can take it at once."""
        with self._mutex:
            if self._lease is not None:
                self._store.leases.release(self._lease)
                self._lease = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _has_lock(self) -> bool:
        if self._lock is None:
            try:
                self._lock = Lock(self._lock_path, wait_s=0.05)
            except LockHeld:
                return False
        return True

    def _acquire(self) -> Lease | None:
        leases = self._store.leases
        lease = leases.acquire(SCHEDULER, self._holder, self._ttl_s)
        if lease is not None:
            return lease
        held = leases.holder(SCHEDULER)
        if held is not None and (self._one_host or held.holder.startswith(f"{self._place}-")):
            # We hold the lock that the holder held as long as it lived.
            leases.release(held)
        return leases.acquire(SCHEDULER, self._holder, self._ttl_s)
