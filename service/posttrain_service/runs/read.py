"""What a run directory says: progress, metrics over all attempts, complete checkpoints. Read anew each time, never written.

The trainer writes these files while they are read, and a killed one may leave a torn line behind: such a line is no
point, and a checkpoint whose files don't agree with its manifest is no checkpoint.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain_service.errors import NotFound
from posttrain_service.runs.tail import read_end
from posttrain_trainer.contract.plainfile import NotPlain, open_plain
from posttrain_trainer.contract.rundir import RunDir, read_json

Point = dict[str, Any]

_LATEST_BYTES = 65536
MAX_POINT_BYTES = 1024 * 1024
"""Longest line of metrics that is read."""
_YEAR_10000 = 253402300800  # the first time in seconds that no date can show
_CURVES = ("loss", "validation_loss", "grad_norm", "learning_rate")
DOWNLOADABLE = ("model", "merged")
"""Folders of a checkpoint that may leave the server; `state/` holds pickles of the optimizer."""


def progress(run_dir: RunDir, attempt: int) -> dict[str, Any] | None:
    """The newest heartbeat of an attempt with `percent` (0 to 100, None while the total is unknown); None before the first."""
    try:
        beat = read_json(run_dir.attempt(attempt).heartbeat)
    except (OSError, ValueError):
        return None
    return with_percent(beat) if isinstance(beat, dict) else None


def with_percent(heartbeat: dict[str, Any]) -> dict[str, Any]:
    """A heartbeat, read or stored, with its `percent`."""
    step, total = heartbeat.get("step"), heartbeat.get("total_steps")
    known = _is_number(step) and _is_number(total) and total > 0  # type: ignore[operator]
    return heartbeat | {"percent": round(min(100.0, 100 * step / total), 2) if known else None}  # type: ignore[operator]


def metrics(
    run_dir: RunDir, *, names: Sequence[str] | None = None, after_step: int | None = None, max_points: int | None = None
) -> list[Point]:
    """The points of a run by step; where attempts made the same step, the newest attempt's.

    Args:
        run_dir: The run's folder.
        names: Keys to keep, besides step; None = all. A point that has none of them is left out.
        after_step: Only later steps.
        max_points: Fewer points than there are, chosen so that lows and highs stay.
    """
    found: dict[int, Point] = {}
    for attempt in run_dir.attempts():
        mine: dict[int, Point] = {}
        for point in _points(attempt.metrics, attempt.number):
            if after_step is None or point["step"] > after_step:
                # A validation is a record of its own; within one attempt it belongs to the point of its step.
                mine[point["step"]] = mine.get(point["step"], {}) | point
        found |= mine
    points = [found[step] for step in sorted(found)]
    if names is not None:
        wanted = {"step", *names}
        points = [{key: value for key, value in point.items() if key in wanted} for point in points]
        points = [point for point in points if any(name in point for name in names)]
    return points if max_points is None else downsample(points, max_points, names or _CURVES)


def latest(run_dir: RunDir) -> Point | None:
    """The newest point of the newest attempt that made one; the cost does not grow with the run."""
    for attempt in reversed(run_dir.attempts()):
        try:
            chunk = read_end(attempt.metrics, _LATEST_BYTES)
        except OSError:  # one unreadable file is no reason to hide all other jobs
            continue
        lines = chunk.data.split(b"\n")
        # The first line begins in the middle unless the file was read whole; the last one isn't ended.
        merged: Point | None = None
        for line in reversed(lines[1 if chunk.start else 0 : -1]):
            point = parse_point(line, attempt.number)
            if point is None:
                continue
            if merged is not None and point["step"] != merged["step"]:
                break  # records of one step stand together: its point, then its validation
            merged = point | (merged or {})
        if merged is not None:
            return merged
    return None


def downsample(points: Sequence[Point], max_points: int, names: Sequence[str]) -> list[Point]:
    """At most `max_points` of the points, among them the first, the last, and in each stretch the low and the high of each name.

    Args:
        points: By step.
        max_points: At least 1.
        names: The curves whose extremes count; with few points allowed, the first names only.
    """
    if len(points) <= max_points:
        return list(points)
    if max_points < 4:
        return [*points[: max_points - 1], points[-1]]
    curves = [name for name in names if any(_is_number(point.get(name)) for point in points)]
    curves = curves[: (max_points - 2) // 2] or ["step"]
    num_stretches = max(1, (max_points - 2) // (2 * len(curves)))
    chosen = {0, len(points) - 1}
    for stretch in range(num_stretches):
        indices = range(len(points) * stretch // num_stretches, len(points) * (stretch + 1) // num_stretches)
        for name in curves:
            known = [index for index in indices if _is_number(points[index].get(name))]
            if known:
                chosen.add(min(known, key=lambda index: points[index][name]))
                chosen.add(max(known, key=lambda index: points[index][name]))
    return [points[index] for index in sorted(chosen)]


def checkpoints(run_dir: RunDir, *, best_metric: str = "validation_loss") -> list[dict[str, Any]]:
    """The complete checkpoints, lowest step first.

    Keys: id, step, epoch, created_at, size_bytes, files (path, size_bytes, sha256), metrics, kind, attempt, trigger, best.

    Args:
        run_dir: The run's folder.
        best_metric: What makes one the best: an accuracy's highest, anything else's lowest. Without that metric in any
            manifest none is the best.
    """
    found = []
    for checkpoint_id in run_dir.checkpoint_ids():
        manifest = complete_manifest(run_dir, checkpoint_id)
        if manifest is not None:
            shown = {key: manifest.get(key) for key in _SHOWN} | {"metrics": _numbers(manifest.get("metrics"))}
            found.append(shown | {"size_bytes": sum(file["size_bytes"] for file in manifest["files"]), "best": False})
    sign = -1 if best_metric.endswith("accuracy") else 1
    rated = [(sign * entry["metrics"][best_metric], entry) for entry in found if _is_number(entry["metrics"].get(best_metric))]
    if rated:
        min(rated, key=lambda pair: pair[0])[1]["best"] = True
    return found


_SHOWN = ("id", "step", "epoch", "created_at", "kind", "attempt", "trigger", "files")


def complete_manifest(run_dir: RunDir, checkpoint_id: str) -> dict[str, Any] | None:
    """The manifest of a checkpoint all of whose files are there in their full size; None for any other.

    Raises:
        ValueError: Not the form of a checkpoint id.
    """
    folder = run_dir.checkpoint(checkpoint_id)
    try:
        manifest = read_json(folder / "manifest.json")
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("id") != checkpoint_id or not isinstance(manifest.get("files"), list):
        return None
    whole = all(_is_whole(folder, file) for file in manifest["files"])
    return manifest if whole and not folder.is_symlink() and _has_form(manifest) else None


def checkpoint_file(run_dir: RunDir, checkpoint_id: str, path: str) -> tuple[Path, int]:
    """Path and size in bytes of one downloadable file of a complete checkpoint.

    Raises:
        NotFound: No such checkpoint, or a path that its manifest doesn't list below `model/` or `merged/`.
    """
    for listed, resolved, size_bytes in checkpoint_files(run_dir, checkpoint_id):
        if listed == path:
            return resolved, size_bytes
    raise NotFound(f"checkpoint {checkpoint_id} has no file {path!r} to download; its list of files names those below model/")


def checkpoint_files(run_dir: RunDir, checkpoint_id: str) -> list[tuple[str, Path, int]]:
    """Every downloadable file of a complete checkpoint as (path inside it, path, size in bytes), to be opened by open_plain.

    Raises:
        NotFound: No such checkpoint.
    """
    try:
        manifest = complete_manifest(run_dir, checkpoint_id)
    except ValueError as error:
        raise NotFound(str(error)) from error
    if manifest is None:
        raise NotFound(f"there is no complete checkpoint {checkpoint_id}")
    folder = run_dir.checkpoint(checkpoint_id)
    listed = [file for file in manifest["files"] if PurePosixPath(file["path"]).parts[0] in DOWNLOADABLE]
    return [(file["path"], folder / file["path"], file["size_bytes"]) for file in listed]


def _points(path: Path, attempt: int) -> Iterator[Point]:
    try:
        fd = open_plain(path)
    except (FileNotFoundError, NotPlain):
        return
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        whole = True
        while line := file.readline(MAX_POINT_BYTES):  # the pieces of a longer line are no points
            ended = line.endswith(b"\n")
            if whole and ended and (point := parse_point(line, attempt)) is not None:
                yield point
            whole = ended


def parse_point(line: bytes, attempt: int) -> Point | None:
    """The point in one line of an attempt's metrics.jsonl; None when the line is torn or none."""
    try:
        point = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    if not isinstance(point, dict) or type(point.get("step")) is not int or not _is_number(point["step"]):
        return None
    point["attempt"] = attempt  # the folder decides, whatever the record says
    return point


def _is_number(value: object) -> bool:
    """Whether a value is a finite number that a float can hold; JSON has larger integers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _numbers(metrics: object) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if _is_number(value)} if isinstance(metrics, dict) else {}


def _has_form(manifest: dict[str, Any]) -> bool:
    if type(manifest.get("step")) is not int or not _is_number(manifest.get("created_at")):
        return False
    return 0 <= manifest["created_at"] < _YEAR_10000 and all(_is_number(manifest.get(key)) for key in ("step", "epoch"))


def _is_whole(folder: Path, file: Any) -> bool:
    """Whether a file of a manifest is a plain file inside the checkpoint and has the size it should have."""
    if not isinstance(file, dict) or not isinstance(file.get("path"), str) or type(file.get("size_bytes")) is not int:
        return False
    path = PurePosixPath(file["path"])
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in file["path"]:
        return False
    return all(_is_plain(folder, parent) for parent in _parents(path)) and _size(folder / path) == file["size_bytes"]


def _parents(path: PurePosixPath) -> Iterable[PurePosixPath]:
    return list(path.parents)[:-1]


def _is_plain(folder: Path, path: PurePosixPath) -> bool:
    return not (folder / path).is_symlink()


def _size(path: Path) -> int | None:
    try:
        facts = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None
