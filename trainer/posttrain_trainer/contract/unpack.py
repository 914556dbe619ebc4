"""The plain bytes of a file that may be packed by gzip or Zstandard, told by its first bytes.

Standard library only, but zstandard where a file needs it. Memory stays bounded whatever the archive unpacks to.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

_ZSTD_CHUNK = 2048  # so few bytes of Zstandard stand for 64 MiB at most


class FileFault(Exception):
    """The file as a whole cannot be read any further; `line` says where."""

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.line = line


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Unpacked(io.RawIOBase):
    """The unpacked bytes of a file that is open at its beginning.

    Args:
        file: A seekable binary file.
        max_bytes: Most unpacked bytes; reading past them raises FileFault. None = no limit.
    """

    def __init__(self, file: BinaryIO, max_bytes: int | None = None) -> None:
        self._stream = _open(file)
        self._max_bytes = max_bytes
        self._seen = 0
        self._pending = b""

    def readable(self) -> bool:
        """True: the stream can only be read."""
        return True

    def head(self, size: int) -> bytes:
        """The first `size` bytes (fewer in a shorter file), which stay to be read."""
        while len(self._pending) < size and (data := self._next(size - len(self._pending))):
            self._pending += data
        return self._pending[:size]

    def drop(self, size: int) -> None:
        """Leave out the next `size` bytes, which `head` has shown."""
        self._pending = self._pending[size:]

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the next piece goes; 0 at the end.

        Raises:
            FileFault: The archive is damaged or cut off, or unpacks to more than `max_bytes`.
        """
        size = len(buffer)
        if self._pending:
            data, self._pending = self._pending[:size], self._pending[size:]
        else:
            data = self._next(size)
        buffer[: len(data)] = data
        return len(data)

    def _next(self, size: int) -> bytes:
        try:
            data = self._stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileFault(f"the compressed file is damaged or cut off: {error}") from error
        self._seen += len(data)
        if self._max_bytes is not None and self._seen > self._max_bytes:
            raise FileFault(f"the file unpacks to more than {self._max_bytes:,} bytes")
        return data


def _open(file: BinaryIO) -> _Readable:
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if magic == b"\x28\xb5\x2f\xfd":
        return _Zstandard(file)
    return file


class _Zstandard:
    """Frames of Zstandard, decoded a little at a time; a cut frame is an error (zstandard's own reader ends silently)."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise FileFault("reading .zst needs the package zstandard here; install it, or use .gz") from error
        self._file = file
        self._error: type[Exception] = zstandard.ZstdError
        self._new: Callable[[], Any] = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj
        self._frame: Any = None
        self._rest = b""
        self._out = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        while not self._out and (raw := self._rest or self._file.read(_ZSTD_CHUNK)):
            self._frame = self._frame or self._new()
            try:
                self._out, self._rest = memoryview(self._frame.decompress(raw)), b""
            except self._error as error:
                raise FileFault(f"the compressed file is damaged: {error}") from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        if not self._out and self._frame is not None:
            raise FileFault("the compressed file is cut off")
        out, self._out = bytes(self._out[:size]), self._out[size:]
        return out
