"""JSON records of runs, parsed again only when their file has changed: live runs are looked at every second.

No more than a saving of work: what the file is, is asked of the file system each time.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

from posttrain_trainer.contract.rundir import read_json

MOST = 4096
"""Most records that are kept."""

Stamp = tuple[int, int, int, int, int]


def stamp(path: Path) -> Stamp | None:
    """What tells one content of a file from the next: device, inode, size and both times; None when it isn't there.

    A file that a link now leads to is another one, so what is remembered of the one that was read is not taken for it.

    Raises:
        OSError: Its folder may not be entered.
    """
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - a tenth of the time of Path's
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Records:
    """Reads records. For one thread; what it gives must not be changed."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Stamp, Any]] = OrderedDict()

    def read(self, path: Path) -> Any | None:
        """See `read_json`."""
        name = str(path)
        now = stamp(path)  # before it is read: what comes in between is found changed the next time
        known = self._known.get(name)
        if known is not None and known[0] == now:
            self._known.move_to_end(name)
            return known[1]
        self._known.pop(name, None)
        record = read_json(path)
        if record is not None and now is not None:
            self._known[name] = now, record
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        return record
