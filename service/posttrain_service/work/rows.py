"""Rows before any job: where they come from, whether each line is good, and putting them into a run's folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain_service.errors import InvalidRequest, PayloadTooLarge
from posttrain_trainer.contract.conversation import Kind, TrainOn
from posttrain_trainer.contract.methods import Method, PretrainMethod
from posttrain_trainer.contract.rowreport import Remark, RowReport
from posttrain_trainer.contract.rows import validate_file, validate_rows
from posttrain_trainer.contract.rundir import sync_folder

MAX_ERRORS = 100
"""Most bad rows that are listed; all are counted."""
_KINDS: dict[str, Kind] = {"sft": "conversation", "dpo": "preference", "pretrain": "document"}
_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz", ".zst"})


@dataclass(frozen=True)
class Source:
    """Training rows: an uploaded file, or rows that came inline."""

    path: Path | None = None
    """Of an upload: where its bytes are."""
    filename: str = "rows.jsonl"
    """Of an upload: the name it had at the sender."""
    file_id: str | None = None
    sha256: str | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    """Of an inline set: the rows."""

    @property
    def suffix(self) -> str:
        """The ending by which the trainer tells CSV from JSON lines, `.jsonl` where the name has none it knows."""
        endings = [ending.lower() for ending in Path(self.filename).suffixes[-2:]]
        return "".join(ending for ending in endings if ending in _SUFFIXES) or ".jsonl"

    def reference(self) -> dict[str, Any]:
        """What a stored spec says about it."""
        if self.file_id is None:
            return {"rows": len(self.rows)}
        return {"file": self.file_id, "filename": self.filename, "sha256": self.sha256}


def inline(rows: Sequence[Mapping[str, Any]], max_rows: int) -> Source:
    """Rows that came with a request.

    Raises:
        PayloadTooLarge: More than `max_rows`.
    """
    if len(rows) > max_rows:
        raise PayloadTooLarge(
            f"{len(rows)} inline rows are more than the {max_rows} that a request may hold; upload them as a file",
            param="dataset.rows",
        )
    return Source(rows=rows)


class Checker:
    """Checks every row of a source, and remembers the verdict on files, which never change."""

    def __init__(self, max_bytes: int, remembered: int = 64) -> None:
        self._max_bytes = max_bytes
        self._remembered = remembered
        self._reports: OrderedDict[tuple[str, str, str, str | None, str], RowReport] = OrderedDict()
        self._lock = threading.Lock()

    def report(self, source: Source, method: Method, train_on: TrainOn = "assistant") -> RowReport:
        """What the rows are worth for a method that learns the turns that `train_on` names."""
        kind = _KINDS[method.kind]
        column = method.text_column if isinstance(method, PretrainMethod) and method.text_column != "auto" else None
        if source.path is None:
            return validate_rows(source.rows, max_errors=MAX_ERRORS, kind=kind, text_column=column, train_on=train_on)
        key = (str(source.sha256), source.suffix, kind, column, train_on)
        with self._lock:
            if key in self._reports:
                self._reports.move_to_end(key)
                return self._reports[key]
        # A packed file may stand for far more text than its own bytes; a bound keeps that from being endless.
        report = validate_file(
            source.path, name=f"train{source.suffix}", max_errors=MAX_ERRORS, kind=kind, text_column=column,
            train_on=train_on, max_bytes=16 * self._max_bytes,
        )
        with self._lock:
            self._reports[key] = report
            while len(self._reports) > self._remembered:
                self._reports.popitem(last=False)
        return report


def report_json(report: RowReport) -> dict[str, Any]:
    """A report as the service shows and stores it."""
    return {
        "valid": report.valid,
        "rows": report.rows,
        "format": report.format,
        "errors": errors_json(report),
        "num_errors": report.num_errors,
        "ignored": dict(report.ignored),
        "warnings": [
            {"message": f"rows hold {sentence}", "rows": remark.rows, "lines": list(remark.lines)}
            for sentence, remark in report.remarks.items()
        ] + [{"message": sentence, "rows": sum(report.formats.values()), "lines": [1]} for sentence in mixed(report)],
    }


def mixed(report: RowReport) -> list[str]:
    """A sentence where the rows have several shapes: that is allowed, and more often an accident than meant."""
    if len(report.formats) < 2:
        return []
    shapes = ", ".join(f"{count} {name}" for name, count in sorted(report.formats.items(), key=lambda pair: (-pair[1], pair[0])))
    return [f"rows have several shapes ({shapes}); each is trained on as what it is"]


def errors_json(report: RowReport) -> list[dict[str, Any]]:
    """The listed bad rows."""
    return [{"line": error.line, "loc": f"line {error.line}", "message": error.message} for error in report.errors]


def refuse_shapes(report: RowReport, param: str, unwanted: frozenset[str]) -> None:
    """Refuse a set with rows of a shape that is not what was asked for.

    Raises:
        InvalidRequest: There are such rows.
    """
    if found := sorted(unwanted & set(report.formats)):
        raise InvalidRequest(
            f"{param} has {report.formats[found[0]]} rows of the shape {found[0]}, which is not what the request says",
            code="invalid_data_format",
            param=param,
        )


def refuse_bad_rows(report: RowReport, param: str, *, skip: bool, max_invalid_rows: int) -> list[str]:
    """Refuse a set that a job could not train on; what is tolerated comes back as warnings.

    Args:
        report: What the check found.
        param: The request's field that names the set.
        skip: Whether bad rows may be left out.
        max_invalid_rows: With skip: the most that may.

    Raises:
        InvalidRequest: With every listed line.
    """
    warnings = [
        f"{param}: {remark.rows} rows hold {sentence} ({_lines(remark)})" for sentence, remark in report.remarks.items()
    ] + [f"{param}: {sentence}" for sentence in mixed(report)]
    if report.valid:
        return warnings
    good = report.rows - report.num_errors
    first = report.errors[0]
    if skip and good > 0 and not report.fatal and report.num_errors <= max_invalid_rows:
        return [
            *warnings,
            f"{param}: {report.num_errors} of {report.rows} rows are bad and left out; the first is line {first.line}: {first.message}",
        ]
    remedy = "mend the rows, or set training.invalid_rows to 'skip'" if good > 0 and not skip else "mend the rows"
    if skip and report.num_errors > max_invalid_rows:
        remedy = f"mend the rows, or raise training.max_invalid_rows ({max_invalid_rows})"
    raise InvalidRequest(
        f"{param}: {report.num_errors} of {report.rows} rows cannot be used; line {first.line}: {first.message}; {remedy}",
        code="invalid_data",
        param=param,
        errors=errors_json(report),
    )


def _lines(remark: Remark) -> str:
    shown = remark.lines[:5]
    more = ", ..." if remark.rows > len(shown) else ""
    return f"line{'s' * (remark.rows > 1)} {', '.join(map(str, shown))}{more}"


def place(source: Source, folder: Path, stem: str) -> str:
    """Put the rows into a run's data folder, durably; the file's name in it.

    An upload is hard-linked where the file system allows (neither side ever writes to it again), so that deleting
    the upload doesn't take the rows away from the run.
    """
    name = f"{stem}{source.suffix}"
    target = folder / name
    if source.path is None:
        with target.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in source.rows)
            file.flush()
            os.fsync(file.fileno())
    else:
        try:
            os.link(source.path, target, follow_symlinks=False)
        except OSError:
            shutil.copyfile(source.path, target, follow_symlinks=False)
            with target.open("rb") as copied:
                os.fsync(copied.fileno())
    sync_folder(folder)
    return name
