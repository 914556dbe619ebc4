"""The end of the log that explains a failure."""

from __future__ import annotations

from posttrain_service.runs.tail import collapse, tail
from posttrain_trainer.contract.rundir import AttemptDir

LINES = 40
_MAX_CHARS = 8000


def log_tail(attempt: AttemptDir, rank: int | None) -> str | None:
    """The last lines of the log of the rank that failed, else of the launcher; None when neither has written anything."""
    sources = [attempt.torchrun_log] if rank is None else [attempt.rank_log(rank), attempt.torchrun_log]
    for path in sources:
        text = collapse(tail(path, LINES, final=True, max_bytes=64 * 1024).text).strip()
        if text:
            return text[-_MAX_CHARS:]
    return None
