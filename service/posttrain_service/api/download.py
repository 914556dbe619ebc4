"""Files out: one file with Range, and many as an uncompressed tar, both in constant memory.

A path comes from a row or a manifest, never from the request alone; still the last component is never followed when
it is a link, and a file that isn't a regular one is never read.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from posttrain_service.api.answers import error_answer
from posttrain_service.errors import NotFound
from posttrain_trainer.contract.plainfile import NotPlain, open_plain

CHUNK_BYTES = 256 * 1024
_MAX_RANGE_HEADER = 100
_ONE_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.IGNORECASE)
_BLOCK = 512
_BYTES = "application/octet-stream"
_TRAILER = bytes(2 * _BLOCK)

TarMember = tuple[str, Path, int]
"""Name inside the archive, resolved path, size in bytes."""


def file_response(request: Request, path: Path, *, filename: str) -> Response:
    """The file, or the one part of it that the request's Range header names.

    Only a single range is honoured; a header with several, or a long one, is answered with the whole file, which HTTP
    allows (RFC 9110, 14.2): parsing and merging many ranges is where servers were made to burn time.

    Raises:
        NotFound: The file isn't there any more, or isn't a regular file.
    """
    fd = _open(path)
    found = os.fstat(fd)
    etag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
    headers = {
        "accept-ranges": "bytes",
        "etag": etag,
        "content-disposition": _disposition(filename),
    }
    if _is_known(request.headers.get("if-none-match", ""), etag):
        os.close(fd)
        return Response(None, 304, headers)
    if request.method == "HEAD":
        os.close(fd)
        return Response(None, 200, headers | {"content-length": str(found.st_size)}, media_type=_BYTES)
    span = _range(request, etag, found.st_size)
    if span is None:
        headers["content-length"] = str(found.st_size)
        return _streaming(_Pieces(fd, 0, found.st_size), 200, headers)
    start, end = span
    if start >= end:
        os.close(fd)
        return error_answer(
            416,
            f"the file has {found.st_size} bytes; the range begins behind its end",
            code="range_not_satisfiable",
            headers={"content-range": f"bytes */{found.st_size}"},
        )
    headers |= {"content-length": str(end - start), "content-range": f"bytes {start}-{end - 1}/{found.st_size}"}
    return _streaming(_Pieces(fd, start, end), 206, headers)


def tar_response(members: Sequence[TarMember], *, filename: str, mtime: float) -> Response:
    """The members as one tar: same members, same bytes. Its Content-Length lets a client see a broken transfer."""
    size = sum(len(_header(name, length, mtime)) + _padded(length) for name, _, length in members) + len(_TRAILER)
    headers = {"content-length": str(size), "content-disposition": _disposition(filename)}
    return StreamingResponse(_tar(members, mtime), 200, headers, media_type="application/x-tar")


def _streaming(body: Iterator[bytes], status: int, headers: dict[str, str]) -> Response:
    return StreamingResponse(body, status, headers, media_type=_BYTES)


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except NotPlain as error:
        raise NotFound(f"{path.name!r} is not a regular file") from error
    except OSError as error:
        raise NotFound(f"the file {path.name!r} is not there any more") from error


class _Pieces:
    """Bytes `start` to `end` of an open file. It is closed at the end, and also when nobody reads that far."""

    def __init__(self, fd: int, start: int, end: int) -> None:
        self._fd, self._at, self._end = fd, start, end

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._at >= self._end:
            self.close()
            raise StopIteration
        piece = os.pread(self._fd, min(CHUNK_BYTES, self._end - self._at), self._at)
        if not piece:
            raise OSError("the file became shorter while it was sent")
        self._at += len(piece)
        return piece

    def close(self) -> None:
        """Close the file; harmless a second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _is_known(condition: str, etag: str) -> bool:
    """Whether If-None-Match names the file as it is (RFC 9110, 13.1.2: the weak comparison)."""
    return any(tag.strip().removeprefix("W/") in ("*", etag) for tag in condition.split(","))


def _range(request: Request, etag: str, size: int) -> tuple[int, int] | None:
    """The asked-for half-open range; None = the whole file. An empty range cannot be satisfied."""
    header = request.headers.get("range", "")
    condition = request.headers.get("if-range")
    if not header or len(header) > _MAX_RANGE_HEADER or (condition is not None and condition != etag):
        return None
    match = _ONE_RANGE.fullmatch(header.replace(" ", ""))
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return (max(size - int(match[2]), 0), size)
    start = int(match[1])
    end = min(int(match[2]) + 1, size) if match[2] else size
    if match[2] and int(match[2]) < start:
        return None
    return (start, end)


def _disposition(filename: str) -> str:
    plain = "".join(char if char.isascii() and char.isprintable() and char not in '"\\' else "_" for char in filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"


def _tar(members: Sequence[TarMember], mtime: float) -> Iterator[bytes]:
    for name, path, size in members:
        fd = _open(path)
        yield _header(name, size, mtime)
        yield from _Pieces(fd, 0, size)
        yield bytes(_padded(size) - size)
    yield _TRAILER


def _header(name: str, size: int, mtime: float) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(mtime), 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
