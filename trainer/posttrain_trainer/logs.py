"""Logging of a rank: one format, rank 0 speaks, the others only warn, libraries keep their progress bars to themselves."""

from __future__ import annotations

import logging
import sys
import time

_LIBRARIES = ("transformers", "peft", "accelerate", "torchao", "huggingface_hub", "filelock", "urllib3", "fsspec")


def set_up(level: str = "info", *, rank: int = 0) -> None:
    """Send all log records and Python warnings of this process to stderr; safe to call again.

    Args:
        level: Least severe message that is kept (debug, info, warning, error).
        rank: Global rank. Ranks but 0 keep warnings and errors only, unless the level is debug.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    if rank != 0 and least > logging.DEBUG:
        least = max(least, logging.WARNING)
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ rank{rank} %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=least, handlers=[handler], force=True)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(max(least, logging.WARNING))
    logging.captureWarnings(True)


def quiet_progress_bars() -> None:
    """No progress bars of transformers or the hub: in a log file each redraw would be a line."""
    # Imported here: set_up serves the first lines of a rank, before the slow imports are done.
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
