"""One upload's multipart body read as it arrives: fields, then the bytes of its one file, never a temporary copy.

Runs in a worker thread; the bytes are fetched from the event loop piece by piece, so a slow disk slows the sender.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from posttrain_service.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_FIELD_BYTES = 10_000
_MAX_FIELDS = 20
_MAX_HEADER_BYTES = 16_384


class Upload:
    """The parts of a multipart body in order of arrival.

    Args:
        content_type: The request's Content-Type, which holds the boundary.
        fetch: Returns the next piece of the body, b"" at its end.
        part: Name of the part that holds the file.

    Attributes:
        fields: Fields seen so far; complete once `read` has returned b"".
        filename: The file's name as sent; None before the file part began, or when it has none.
    """

    def __init__(self, content_type: str, fetch: Callable[[], bytes], part: str = "file") -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequest("send the file as multipart/form-data with a boundary", param="file")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._fetch = fetch
        self._part = part
        try:
            self._parser = MultipartParser(boundary, _callbacks(self))
        except FormParserError as error:  # e.g. a boundary longer than RFC 2046 allows
            raise InvalidRequest(f"the multipart boundary cannot be used: {error}", code="invalid_multipart") from error
        self._data = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._header_name, self._header_value, self._header_bytes = bytearray(), bytearray(), 0
        self._field: str | None = None
        self._field_value = bytearray()
        self._in_file, self._file_seen, self._ended = False, False, False

    def find_file(self) -> None:
        """Read on until the file part begins.

        Raises:
            InvalidRequest: The body has no file part, or isn't a whole multipart body.
        """
        while not self._file_seen:
            if not self._feed():
                raise InvalidRequest(f"the upload has no part named {self._part!r}", code="missing_file", param=self._part)

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes of the file (all when negative); b"" at its end, with the whole body read.

        Raises:
            InvalidRequest: The body broke off, or what follows the file cannot be used.
        """
        while (size < 0 or len(self._data) < size) and self._feed():
            if size > 0 and self._data:
                break
        taken = bytes(self._data if size < 0 else self._data[:size])
        del self._data[: len(taken)]
        return taken

    def _feed(self) -> bool:
        """Parse the next piece; False at the end of the body."""
        if self._ended:
            return False
        piece = self._fetch()
        try:
            if piece:
                self._parser.write(piece)
                return True
            self._parser.finalize()
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body is malformed: {error}", code="invalid_multipart") from error
        if not self._ended:
            raise InvalidRequest("the upload broke off before its end; nothing was stored", code="upload_incomplete")
        return False

    # Callbacks of the parser, in the order in which they come.

    def part_begin(self) -> None:
        """A part begins."""
        self._headers = {}
        self._header_bytes = 0

    def header_field(self, data: bytes, start: int, end: int) -> None:
        """Some of a header's name."""
        self._header_name += self._header_piece(data, start, end)

    def header_value(self, data: bytes, start: int, end: int) -> None:
        """Some of a header's value."""
        self._header_value += self._header_piece(data, start, end)

    def header_end(self) -> None:
        """A header is complete."""
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()

    def headers_finished(self) -> None:
        """The part's content follows: a field's, or the file's."""
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = name == self._part
        if self._in_file:
            if self._file_seen:
                raise InvalidRequest(f"the upload has two parts named {self._part!r}; send one file at a time", param=self._part)
            self._file_seen = True
            if b"filename" in options:
                self.filename = options[b"filename"].decode("utf-8", "replace")
            return
        if name in self.fields or len(self.fields) >= _MAX_FIELDS:
            raise InvalidRequest(
                f"the field {name[:100]!r} is given twice, or there are too many fields", param=name[:100]
            )
        self._field, self._field_value = name, bytearray()

    def part_data(self, data: bytes, start: int, end: int) -> None:
        """Some of a part's content."""
        if self._in_file:
            self._data += data[start:end]
            return
        self._field_value += data[start:end]
        if len(self._field_value) > _MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"the field {self._field!r} is longer than {_MAX_FIELD_BYTES} bytes", param=self._field
            )

    def part_end(self) -> None:
        """The part is complete."""
        if not self._in_file and self._field is not None:
            self.fields[self._field] = self._field_value.decode("utf-8", "replace")
        self._in_file, self._field = False, None

    def end(self) -> None:
        """The closing boundary was seen."""
        self._ended = True

    def _header_piece(self, data: bytes, start: int, end: int) -> bytes:
        self._header_bytes += end - start
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise InvalidRequest("a part of the upload has too long headers", code="invalid_multipart")
        return data[start:end]


def _callbacks(upload: Upload) -> MultipartCallbacks:
    return {
        "on_part_begin": upload.part_begin,
        "on_part_data": upload.part_data,
        "on_part_end": upload.part_end,
        "on_header_field": upload.header_field,
        "on_header_value": upload.header_value,
        "on_header_end": upload.header_end,
        "on_headers_finished": upload.headers_finished,
        "on_end": upload.end,
    }
