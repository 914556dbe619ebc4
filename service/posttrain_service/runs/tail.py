"""Log files by bytes: a range, the last lines, and what is appended, at a cost that does not grow with the file.

Logs are bytes of foreign programs: invalid or split UTF-8, progress bars drawn with carriage returns, files whose older
part is dropped when their quota is full. Positions count from the beginning of the whole log, dropped or not. A piece
never begins or ends inside a character that is whole in the file, so pieces can be decoded one by one, and put together
they are the file again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain_trainer.contract import logcap
from posttrain_trainer.contract.plainfile import NotPlain, open_plain

BLOCK_BYTES = 65536
MAX_TAIL_BYTES = 4 * 1024 * 1024
"""Most bytes that are read to find the last lines, however long those are."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a file."""

    data: bytes
    start: int
    """Position of its first byte."""
    size: int
    """Size of the file when it was read."""
    restarted: bool = False
    """The file was truncated or replaced since the piece before; positions count anew."""

    @property
    def end(self) -> int:
        """Position after its last byte: where the next piece begins."""
        return self.start + len(self.data)

    @property
    def text(self) -> str:
        """The piece as text; bytes that are no UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", errors="replace")


def read(path: Path, offset: int, limit: int, *, final: bool = False) -> Chunk:
    """Up to `limit` bytes from `offset`, moved to where characters begin and end.

    Args:
        path: The file; a missing one is an empty one.
        offset: First byte; inside a character the piece begins after it, beyond the end it is empty and at the end.
        limit: Most bytes, at least 1; a single character is given whole even when it is longer.
        final: The file has been written to its end, so that an unfinished character there is given too.
    """
    with _opened(path) as log:
        return Chunk(b"", 0, 0) if log is None else _read(log, offset, limit, final)


def read_end(path: Path, limit: int) -> Chunk:
    """The last `limit` bytes."""
    with _opened(path) as log:
        return Chunk(b"", 0, 0) if log is None else _read(log, max(0, log.size - limit), limit, True)


def tail(path: Path, lines: int, *, final: bool = False, max_bytes: int = MAX_TAIL_BYTES) -> Chunk:
    """The last `lines` lines; an unfinished last line counts. `follow` from its `end` loses and repeats nothing.

    Lines end with a line feed: what a progress bar redraws with carriage returns is one line, see `collapse`.

    Args:
        path: The file; a missing one is an empty one.
        lines: How many; none gives an empty piece at the end.
        final: As for `read`.
        max_bytes: Most bytes that are read; lines longer than that are cut at their beginning.
    """
    with _opened(path) as log:
        if log is None:
            return Chunk(b"", 0, 0)
        start = _start_of_last(log, lines, max_bytes)
        return _read(log, start, max(1, log.size - start), final)


def line_start(path: Path, offset: int, max_bytes: int = MAX_TAIL_BYTES) -> int:
    """Where the line begins that `offset` is inside of; for one beyond the end, where the unfinished last line does.

    Args:
        path: The file; a missing one gives 0.
        offset: A position in the whole log.
        max_bytes: Most bytes that are read; in a longer line the position is left as it is.
    """
    with _opened(path) as log:
        if log is None:
            return 0
        offset = max(log.first, min(offset, log.size))
        floor = max(log.first, offset - max_bytes)
        found = log.pread(offset - floor, floor).rfind(b"\n")
        if found >= 0:
            return floor + found + 1
        return floor if floor == log.first else offset


def collapse(text: str) -> str:
    """The text as a terminal would leave it: of a line redrawn with carriage returns only the last state."""
    return "\n".join(_last_state(line) for line in text.split("\n"))


async def follow(
    path: Path,
    offset: int,
    *,
    ended: Callable[[], Awaitable[bool]],
    idle_s: float = 10.0,
    poll_s: float = 0.25,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncIterator[Chunk]:
    """What is in the file from `offset` on and what is appended to it, until it is complete.

    Gives an empty piece after every `idle_s` of silence, so that a stream can show that it lives.

    Args:
        path: The file, which need not exist yet.
        offset: Where to begin.
        ended: Whether nobody will write any more; asked before each look at the file, so nothing written is missed.
        idle_s: Longest silence.
        poll_s: Time between two looks.
        pause: Waits between two looks.
    """
    file_id: tuple[int, int] | None = None
    silent_s = 0.0
    while True:
        is_over = await ended()
        now_id, size = await asyncio.to_thread(_facts, path)
        if file_id is None:  # a cursor beyond the end is of no file that was here: go on with what comes
            offset = min(offset, size)
        restarted = size < offset or (None not in (file_id, now_id) and file_id != now_id)
        if restarted:
            offset = 0
        file_id = now_id or file_id
        chunk = await asyncio.to_thread(read, path, offset, BLOCK_BYTES, final=is_over)
        if chunk.data or restarted:
            yield Chunk(chunk.data, chunk.start, chunk.size, restarted)
            offset, silent_s = chunk.end, 0.0
            continue
        if is_over:
            return
        if silent_s >= idle_s:
            silent_s = 0.0
            yield Chunk(b"", offset, chunk.size)
        await pause(poll_s)
        silent_s += poll_s


@dataclass(frozen=True)
class _Log:
    """An open file that nobody truncates meanwhile, by positions in the whole log: older output may have been dropped."""

    fd: int
    first: int
    """Position of the first byte that is still there; the marker of what was dropped counts as the last dropped bytes."""
    size: int
    """Position after the last byte."""

    def pread(self, limit: int, position: int) -> bytes:
        """Up to `limit` bytes from a position that is still there."""
        return os.pread(self.fd, limit, position - self.first)


@contextmanager
def _opened(path: Path) -> Iterator[_Log | None]:
    """The file while this process may read it; None for a missing one, and for a link, pipe or folder of that name."""
    try:
        fd = open_plain(path)
    except (FileNotFoundError, NotPlain):
        yield None
        return
    try:
        # `logcap.cap` moves bytes about for some milliseconds. Whoever holds the lock for longer isn't it.
        logcap.lock(fd, fcntl.LOCK_SH)
        first, _ = logcap.shift(os.pread(fd, logcap.HEAD_BYTES, 0))
        yield _Log(fd, first, first + os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _read(log: _Log, offset: int, limit: int, final: bool) -> Chunk:
    size = log.size
    offset = max(offset, log.first)
    if offset >= size:
        return Chunk(b"", size, size)
    # Three bytes more on either side: no character is longer than four.
    before = max(log.first, offset - 3)
    data = log.pread(offset - before + limit + 3, before)
    start = _next_boundary(data, offset - before)
    if start > len(data):  # begins inside a character that isn't whole in the file
        return Chunk(data[offset - before :] if final else b"", offset, size)
    stop = min(offset - before + limit, len(data))
    boundary = _next_boundary(data, stop)
    if boundary > len(data):  # the last character isn't whole in the file
        boundary = len(data) if final and before + len(data) >= size else _begin_of(data, stop)
    elif boundary != stop and (begin := _begin_of(data, stop)) > start:
        boundary = begin
    return Chunk(data[start : max(start, boundary)], before + start, size)


def _next_boundary(data: bytes, index: int) -> int:
    """`index`, or the end of the character that begins before and ends after it; that may lie beyond the data."""
    begin = _begin_of(data, index)
    return index if begin == index else begin + _length(data[begin])


def _begin_of(data: bytes, index: int) -> int:
    """Where the character begins that `index` is inside of; `index` itself when it is inside of none."""
    for begin in range(index - 1, max(-1, index - 4), -1):
        length = _length(data[begin])
        if length:
            inside = begin + length > index
            return begin if inside and _is_valid_start(data[begin : begin + length]) else index
        if data[begin] & 0xC0 != 0x80:
            return index
    return index


def _length(byte: int) -> int:
    """Bytes of the character that a first byte announces; 0 for a byte that begins none."""
    if byte < 0x80:
        return 1
    return 2 if 0xC2 <= byte < 0xE0 else 3 if 0xE0 <= byte < 0xF0 else 4 if 0xF0 <= byte < 0xF5 else 0


def _is_valid_start(data: bytes) -> bool:
    """Whether bytes are a character, or the beginning of one that could still become whole."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _start_of_last(log: _Log, lines: int, max_bytes: int) -> int:
    """Where the last lines begin: blocks are read backwards until enough line feeds are found."""
    size = log.size
    if lines <= 0:
        return size
    floor = max(log.first, size - max_bytes)
    end, missing = size, lines
    while end > floor:
        begin = max(floor, end - BLOCK_BYTES)
        block = log.pread(end - begin, begin)
        # The line feed that ends the last line begins no further one.
        stop = len(block) - 1 if end == size and block.endswith(b"\n") else len(block)
        while (found := block.rfind(b"\n", 0, stop)) >= 0:
            missing -= 1
            if missing == 0:
                return begin + found + 1
            stop = found
        end = begin
    return floor


def _last_state(line: str) -> str:
    """Of the states of a line the last that shows anything; the carriage return of a CRLF draws none."""
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""


def _facts(path: Path) -> tuple[tuple[int, int] | None, int]:
    with _opened(path) as log:
        if log is None:
            return None, 0
        facts = os.fstat(log.fd)
        return (facts.st_dev, facts.st_ino), log.size
