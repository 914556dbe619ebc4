"""Files of rows as a stream: JSONL, a JSON array, CSV or Parquet, plain or packed by gzip or Zstandard.

No torch; pyarrow and zstandard are loaded only when a file needs them. What a row means stands in `rows`. Memory stays
bounded by `MAX_ROW_BYTES` however long the file or its lines are.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from posttrain_trainer.contract.unpack import FileFault, Unpacked

MAX_ROW_BYTES = 16 * 2**20
"""Longest row, in bytes of UTF-8; a longer one is refused without being read into memory."""

_CHUNK = 64 * 1024
_HEAD = 4096
_BOMS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


class RawRow(NamedTuple):
    """One row as the file holds it, or the reason why it cannot be read."""

    line: int
    """Line where the row begins, from 1; for Parquet the row's number."""
    value: Any
    """The decoded row; None when `error` is set."""
    error: str | None = None
    """What is wrong; the reader goes on after it where the format allows."""
    fatal: bool = False
    """Whether the file could not be read any further, so that rows after this one are unknown."""


def read_rows(path: Path, *, name: str | None = None, max_row_bytes: int = MAX_ROW_BYTES, max_bytes: int | None = None) -> Iterator[RawRow]:
    """Stream the rows of a file; blank lines of JSONL are no rows.

    Args:
        path: The file. Compression, Parquet, JSON and JSONL are told by content, CSV by the name or its header.
        name: The name to go by where `path` is a stored upload without one.
        max_row_bytes: Longest row, in bytes.
        max_bytes: Most bytes of the unpacked text; more is refused (a compressed bomb); None = no limit.

    Yields:
        RawRow; a fault that ends the file early (not UTF-8 text, cut archive) comes as a last row with an error.

    Raises:
        OSError: The file cannot be opened or read.
    """
    with path.open("rb") as file:
        try:
            if file.read(4) == b"PAR1":
                yield from _parquet(path)
                return
            file.seek(0)
            yield from _text_rows(Unpacked(file, max_bytes), (name or path.name).lower(), max_row_bytes)
        except FileFault as fault:
            yield RawRow(fault.line, None, str(fault), fatal=True)


def _text_rows(stream: Unpacked, name: str, max_row_bytes: int) -> Iterator[RawRow]:
    head = stream.head(_HEAD)
    for bom, encoding in _BOMS.items():
        if head.startswith(bom):
            raise FileFault(f"the file is {encoding}; save it as UTF-8")
    if b"\x00" in head:
        raise FileFault("the file holds NUL bytes, so it is binary or UTF-16; save it as UTF-8 text")
    if head.startswith(codecs.BOM_UTF8):
        stream.drop(len(codecs.BOM_UTF8))
        head = head[len(codecs.BOM_UTF8) :]
    buffered = io.BufferedReader(stream, _CHUNK)
    kind = _kind(head.lstrip(), name)
    if kind == "jsonl" and head.lstrip().startswith((b"{\n", b"{\r\n")):
        raise FileFault("the file is one JSON object over several lines; give an array of rows, or one object a line")
    if kind == "csv":
        yield from _csv(buffered, "\t" if ".tsv" in name else ",", max_row_bytes)
    elif kind == "json":
        yield from _json(buffered, max_row_bytes)
    else:
        yield from _jsonl(buffered, max_row_bytes)


_CSV_HEADERS = {"prompt", "completion", "question", "answer", "instruction", "output", "messages", "conversations", "chosen",
                "rejected", "input_query", "expected_answer", "dialog", "text", "document", "content"}  # fmt: skip


def _kind(head: bytes, name: str) -> str:
    stem = name.removesuffix(".gz").removesuffix(".zst")
    if stem.endswith((".csv", ".tsv")):
        return "csv"
    if head.startswith(b"["):
        return "json"
    if stem.endswith((".jsonl", ".json")) or head.startswith(b"{"):
        return "jsonl"
    header = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    cells = {cell.strip().strip('"') for cell in header.split(",")}
    return "csv" if cells & _CSV_HEADERS else "jsonl"


def _jsonl(stream: BinaryIO, max_row_bytes: int) -> Iterator[RawRow]:
    for line, raw in _lines(stream, max_row_bytes):
        if raw is None:
            yield RawRow(line, None, _too_long(max_row_bytes))
        elif raw.strip():
            yield _decode(line, raw)


def _lines(stream: BinaryIO, max_row_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their number; None for one that is too long, which is skipped piece by piece."""
    number = 0
    while raw := stream.readline(max_row_bytes + 2):
        number += 1
        if len(raw.rstrip(b"\r\n")) <= max_row_bytes:
            yield number, raw
            continue
        while raw and not raw.endswith(b"\n"):
            raw = stream.readline(_CHUNK)
        yield number, None


def _decode(line: int, raw: bytes) -> RawRow:
    try:
        return RawRow(line, parse_json(raw.decode("utf-8").rstrip()))
    except UnicodeDecodeError as error:
        return RawRow(line, None, f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8")
    except ValueError as error:
        return RawRow(line, None, f"not JSON: {error}")


def parse_json(text: str) -> Any:
    """The value of a JSON text, strictly: no NaN, no key twice, no half of a surrogate pair, no bottomless nesting.

    Raises:
        ValueError: With the reason and, for a syntax error, the column.
    """
    try:
        value = _STRICT.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    _check_surrogates(text, value)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def key_given_twice(pairs: list[tuple[str, Any]]) -> str | None:
    """The first key that stands more than once in an object, shortened; None where each stands once."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key if len(key) <= 80 else f"{key[:77]}..."
        seen.add(key)
    return None


def strict_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object for `object_pairs_hook`, of whose keys none may stand twice: one of the values would be lost in silence.

    Raises:
        ValueError: Names the key.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {key_given_twice(pairs)!r} stands twice in one object; keep one")
    return found


_STRICT = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=strict_object)


def _check_surrogates(text: str, value: Any) -> None:
    """An escape such as ud83d without its other half decodes to text that no tokenizer accepts."""
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("an escape \\ud800 to \\udfff stands without its other half") from error


def _json(stream: BinaryIO, max_row_bytes: int) -> Iterator[RawRow]:
    """The elements of one array, each decoded as soon as it is complete."""
    source = _JsonText(stream)
    source.expect("[")
    if source.peek() == "]":
        return
    while True:
        yield source.element(max_row_bytes)
        mark = source.peek()
        if mark == "]":
            source.skip()
            if rest := source.peek():
                raise FileFault(f"text follows the end of the array: {rest!r}", source.line)
            return
        source.expect(",")


class _JsonText:
    """Decoded text of a stream with a moving window, and the line that the window begins at."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=self._object)
        self._twice: str | None = None
        self._text = ""
        self._at = 0
        self._ended = False
        self.line = 1

    def _more(self, size: int = _CHUNK) -> bool:
        if self._ended:
            return False
        raw = self._stream.read(size)
        self._ended = not raw
        try:
            self._text = self._text[self._at :] + self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            raise FileFault("bytes after this line are not UTF-8; save the file as UTF-8", self.line) from error
        self._at = 0
        return bool(raw)

    def skip(self, count: int = 1) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def peek(self) -> str:
        """The next character that isn't white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if (mark := self._text[self._at]) not in " \t\r\n":
                    return mark
                self.skip()
            if not self._more():
                return ""

    def expect(self, mark: str) -> None:
        found = self.peek()
        if found != mark:
            raise FileFault(f"expected {mark!r} but found {found!r}" if found else "the array is cut off", self.line)
        self.skip()

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object; a key that stands twice is kept for the row's error, since the reader goes on after the row."""
        found = dict(pairs)
        if len(found) < len(pairs):
            self._twice = key_given_twice(pairs)
        return found

    def element(self, max_row_bytes: int) -> RawRow:
        self.peek()
        line, size = self.line, _CHUNK
        while True:
            self._twice = None
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                # A number at the very end of the window may go on in the next piece.
                if end < len(self._text) or not self._more():
                    return self._take(line, value, end)
            except RecursionError as error:
                raise FileFault("nested too deeply", line) from error
            except ValueError as error:
                if len(self._text) - self._at > max_row_bytes:
                    raise FileFault(_too_long(max_row_bytes), line) from error
                size *= 2  # so that a long element is scanned a few times, not once for each piece
                if not self._more(size):
                    message = f"{error.msg} at line {self.line + error.lineno - 1}" if isinstance(error, json.JSONDecodeError) else str(error)
                    raise FileFault(f"not JSON: {message}", line) from error

    def _take(self, line: int, value: Any, end: int) -> RawRow:
        text = self._text[self._at : end]
        self.skip(end - self._at)
        if self._twice is not None:
            return RawRow(line, None, f"the key {self._twice!r} stands twice in one object; keep one")
        try:
            _check_surrogates(text, value)
        except ValueError as error:
            return RawRow(line, None, str(error))
        return RawRow(line, value)


def _csv(stream: BinaryIO, delimiter: str, max_row_bytes: int) -> Iterator[RawRow]:
    csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))
    reader = csv.reader(_csv_lines(stream, max_row_bytes), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) != len(header) or "" in header:
            raise FileFault(f"the header row must name each column once, but is {header}")
        line = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(header):
                yield RawRow(line, None, f"{len(cells)} cells, but the header has {len(header)}")
            elif cells:
                yield RawRow(line, {key: cell for key, cell in zip(header, cells, strict=True) if cell != ""})
            line = reader.line_num + 1
    except csv.Error as error:
        raise FileFault(f"not CSV: {error}", reader.line_num) from error


def _csv_lines(stream: BinaryIO, max_row_bytes: int) -> Iterator[str]:
    for number, raw in _lines(stream, max_row_bytes):
        if raw is None:
            raise FileFault(_too_long(max_row_bytes), number)
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileFault(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8", number) from error


def _parquet(path: Path) -> Iterator[RawRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise FileFault("reading Parquet needs the package pyarrow here; install it, or convert the file to JSONL") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(number, _without_nulls(row))
    except (pyarrow.ArrowException, OSError) as error:
        raise FileFault(f"not Parquet: {error}", number + 1) from error


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct every key that any row has; a null there means that the key is absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _too_long(max_row_bytes: int) -> str:
    return f"longer than {max_row_bytes:,} bytes; split it"
