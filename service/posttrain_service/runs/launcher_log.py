"""What torchrun's own log tells of a rank that could not: one that was killed by a signal leaves no record."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from posttrain_service.runs.tail import read_end

_TAIL_BYTES = 16384
_ROOT_CAUSE = b"Root Cause (first observed failure):"
_RANK = re.compile(rb"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S)
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})
"""Signals that a process brings upon itself; any other one came from outside."""


def killed_rank(path: Path) -> dict[str, Any] | None:
    """The error of the rank that failed first, if a signal ended it; in the form of an error-rank-<r>.json.

    Args:
        path: torchrun's log; a missing one tells nothing.
    """
    tail = read_end(path, _TAIL_BYTES).data
    found = _RANK.search(tail, tail.rfind(_ROOT_CAUSE)) if _ROOT_CAUSE in tail else None
    if found is None or int(found[2]) >= 0:
        return None
    rank, number = int(found[1]), -int(found[2])
    try:
        cause = signal.Signals(number)
    except ValueError:
        return None
    if cause in _CRASHES:
        code, text = "trainer_error", f"rank {rank} crashed with {cause.name}; its log has the faulting line"
    else:
        why = ", as the kernel does when memory runs out" if cause is signal.SIGKILL else ""
        code, text = "lost", f"rank {rank} was killed by {cause.name}{why}"
    return {"code": code, "message": text, "rank": rank, "exit_code": -number}
