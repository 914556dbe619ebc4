"""What checking rows finds: one result for each row, and the report on all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from posttrain_trainer.contract.conversation import Row

MAX_NAMES = 50
"""Most different keys, and most different remarks, that a report lists."""
MAX_LINES = 20
"""Most lines that are listed with a remark; all are counted."""


class RowError(NamedTuple):
    """One bad row."""

    line: int
    """Line where the row begins, from 1."""
    message: str
    """Where in the row, what is wrong, and the remedy."""


class ParsedRow(NamedTuple):
    """One row of a file: `row` or `error` is set, never both."""

    line: int
    row: Row | None
    error: str | None
    format: str | None
    """Name of the shape; None when it was not recognised."""
    ignored: tuple[str, ...]
    """Keys that have no meaning in this shape, those inside messages as `messages[].key`."""
    fatal: bool = False
    """Whether the file could not be read past this row."""
    remarks: tuple[str, ...] = ()
    """What is odd about a good row: what it holds, as a sentence that goes on from "rows hold"."""


@dataclass(slots=True)
class Remark:
    """The rows that something is odd about."""

    rows: int = 0
    """How many there are."""
    lines: list[int] = field(default_factory=list)
    """Where the first MAX_LINES of them begin."""

    def add(self, line: int) -> None:
        """Count one more row."""
        self.rows += 1
        if len(self.lines) < MAX_LINES:
            self.lines.append(line)


@dataclass(slots=True)
class RowReport:
    """What a file holds."""

    rows: int = 0
    """Rows found, good and bad."""
    format: str | None = None
    """Shape of the rows; the most frequent one where they differ; None when there is no good row."""
    formats: dict[str, int] = field(default_factory=dict)
    """Good rows of each shape."""
    errors: list[RowError] = field(default_factory=list)
    """The first bad rows, up to the `max_errors` asked for."""
    num_errors: int = 0
    """All bad rows; a file without any row counts as one."""
    fatal: bool = False
    """Whether the file could not be read to its end (cut archive, not UTF-8): leaving bad rows out would lose unseen ones."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Keys that have no meaning, with the number of rows that hold them (the first MAX_NAMES names)."""
    remarks: dict[str, Remark] = field(default_factory=dict)
    """What is odd about rows, ignored keys included, as sentences that go on from "rows hold" (the first MAX_NAMES)."""

    @property
    def valid(self) -> bool:
        """Whether every row is good and there is at least one."""
        return self.num_errors == 0

    def add(self, parsed: ParsedRow, max_errors: int) -> None:
        """Count one row; a fault of the whole file is an error, but no row."""
        self.rows += not parsed.fatal
        for key in parsed.ignored:
            if key in self.ignored or len(self.ignored) < MAX_NAMES:
                self.ignored[key] = self.ignored.get(key, 0) + 1
            self._remark(f"the key {key!r}, which means nothing in their format and is left out", parsed.line)
        for remark in parsed.remarks:
            self._remark(remark, parsed.line)
        if parsed.error is not None:
            self.fatal |= parsed.fatal
            self._fail(parsed.line, parsed.error, max_errors)
        elif parsed.format is not None:
            self.formats[parsed.format] = self.formats.get(parsed.format, 0) + 1

    def close(self, max_errors: int) -> RowReport:
        """Complete the report after the last row."""
        if self.rows == 0 and not self.fatal:
            self.fatal = True
            self._fail(1, "the file holds no rows", max_errors)
        if self.formats:
            self.format = Counter(self.formats).most_common(1)[0][0]
        return self

    def _remark(self, sentence: str, line: int) -> None:
        if sentence in self.remarks or len(self.remarks) < MAX_NAMES:
            self.remarks.setdefault(sentence, Remark()).add(line)

    def _fail(self, line: int, message: str, max_errors: int) -> None:
        self.num_errors += 1
        if len(self.errors) < max_errors:
            self.errors.append(RowError(line, message))
