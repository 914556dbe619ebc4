from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.errors import NotFound
from posttrain_service.runs import read
from posttrain_trainer.contract.events import Manifest, MetricsPoint
from posttrain_trainer.contract.rundir import RunDir, write_json


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def write_points(run_dir: RunDir, attempt: int, points: list[dict[str, Any]], torn: bytes = b"") -> None:
    path = run_dir.attempt(attempt).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [MetricsPoint(attempt=attempt, epoch=0.1, time=1.0, **point) for point in points]
    path.write_bytes(b"".join(r.model_dump_json(exclude_none=True).encode() + b"\n" for r in records) + torn)


def steps(points: list[dict[str, Any]], name: str = "loss") -> dict[int, Any]:
    return {point["step"]: point[name] for point in points if name in point}


def test_of_points_for_one_step_the_newest_attempts_counts(run_dir: RunDir) -> None:
    write_points(run_dir, 1, [{"step": n, "loss": 1.0, "grad_norm": 9.0} for n in range(1, 8)])
    write_points(run_dir, 2, [{"step": n, "loss": 2.0} for n in range(5, 7)])
    write_points(run_dir, 10, [{"step": 6, "loss": 10.0}])
    points = read.metrics(run_dir)
    assert steps(points) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 10.0, 7: 1.0}
    assert steps(points, "attempt") == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 10, 7: 1}
    assert 5 not in steps(points, "grad_norm")  # nothing of the older attempt's point shines through
    assert [point["step"] for point in read.metrics(run_dir, after_step=5)] == [6, 7]
    assert read.latest(run_dir) == read.metrics(run_dir)[5]


def test_a_validation_belongs_to_the_point_of_its_step(run_dir: RunDir) -> None:
    write_points(run_dir, 1, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "validation_loss": 2.5}])
    assert read.metrics(run_dir)[1]["loss"] == 2.0
    assert read.metrics(run_dir)[1]["validation_loss"] == 2.5
    latest = read.latest(run_dir)
    assert latest is not None
    assert (latest["step"], latest["loss"], latest["validation_loss"]) == (2, 2.0, 2.5)
    assert read.metrics(run_dir, names=["validation_loss"]) == [{"step": 2, "validation_loss": 2.5}]


@pytest.mark.parametrize("torn", [b'{"step": 3, "los', b'{"step": 3}', b"\xff\n", b"[]\n", b"null\n", b'{"step": "3"}\n', b'{"loss": 1}\n'])
def test_torn_and_foreign_lines_are_no_points(run_dir: RunDir, torn: bytes) -> None:
    write_points(run_dir, 1, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], torn)
    assert steps(read.metrics(run_dir)) == {1: 3.0, 2: 2.0}
    latest = read.latest(run_dir)
    assert latest is not None
    assert latest["step"] == 2


def test_what_is_not_finite_is_null(run_dir: RunDir) -> None:
    write_points(run_dir, 1, [], b'{"step": 1, "loss": NaN, "grad_norm": Infinity}\n')
    assert read.metrics(run_dir) == [{"step": 1, "loss": None, "grad_norm": None, "attempt": 1}]
    assert read.metrics(run_dir, max_points=1) == read.metrics(run_dir)


def test_a_run_without_points(run_dir: RunDir) -> None:
    assert read.metrics(run_dir) == []
    assert read.latest(run_dir) is None
    write_points(run_dir, 1, [{"step": 1, "loss": 3.0}])
    write_points(run_dir, 2, [])
    run_dir.attempt(3).path.mkdir()
    latest = read.latest(run_dir)
    assert latest is not None
    assert latest["attempt"] == 1


def test_the_latest_point_costs_the_same_in_a_long_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_points(run_dir, 1, [{"step": n, "loss": 1.0} for n in range(1, 5000)])
    sizes: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    latest = read.latest(run_dir)
    assert latest is not None
    assert latest["step"] == 4999
    assert 0 < sum(sizes) < 70_000 < run_dir.attempt(1).metrics.stat().st_size


@pytest.mark.parametrize("max_points", [1, 2, 3, 4, 5, 10, 57, 500])
def test_downsampling_keeps_the_ends_and_the_extremes(max_points: int) -> None:
    points = [{"step": n, "loss": float((n * 7919) % 1000), "grad_norm": 1.0} for n in range(1, 2001)]
    points[700]["loss"], points[1300]["loss"] = -5.0, 5000.0
    points[1500]["grad_norm"] = 77.0
    chosen = read.downsample(points, max_points, ["loss", "grad_norm", "absent"])
    assert len(chosen) <= max_points
    assert [p["step"] for p in chosen] == sorted({p["step"] for p in chosen})
    assert chosen[-1] is points[-1]
    if max_points > 1:
        assert chosen[0] is points[0]
    if max_points >= 4:
        assert {-5.0, 5000.0} <= {p["loss"] for p in chosen}
    if max_points >= 6:
        assert 77.0 in {p["grad_norm"] for p in chosen}
    if max_points >= 500:
        assert len(chosen) > max_points / 3


def test_few_points_stay_as_they_are_and_gaps_do_no_harm() -> None:
    points: list[dict[str, Any]] = [{"step": n} for n in range(100)]
    assert read.downsample(points, 100, ["loss"]) == points
    points[40]["loss"] = None
    points[41]["loss"] = 1.0
    chosen = read.downsample(points, 10, ["loss"])
    assert points[41] in chosen
    assert 4 <= len(read.downsample(points, 10, ["other"])) <= 10


def test_progress(run_dir: RunDir) -> None:
    attempt = run_dir.attempt(1)
    assert read.progress(run_dir, 1) is None
    attempt.path.mkdir(parents=True)
    write_json(attempt.heartbeat, {"phase": "train", "step": 3, "total_steps": 8, "time": 1.0})
    assert read.progress(run_dir, 1) == {"phase": "train", "step": 3, "total_steps": 8, "time": 1.0, "percent": 37.5}
    write_json(attempt.heartbeat, {"phase": "load", "step": 0, "total_steps": None})
    assert read.progress(run_dir, 1) == {"phase": "load", "step": 0, "total_steps": None, "percent": None}
    attempt.heartbeat.write_text("{torn")
    assert read.progress(run_dir, 1) is None


def write_checkpoint(run_dir: RunDir, step: int, **metrics: float) -> Path:
    folder = run_dir.checkpoints / f"step-{step:06d}"
    files = {"model/model.safetensors": b"weights", "model/sub/config.json": b"{}", "state/0.distcp": b"state"}
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    manifest = Manifest(
        id=folder.name, step=step, epoch=1.0, samples_seen=1, attempt=1, created_at=5.0, kind="full", trigger="steps",
        metrics=metrics, arguments_digest="0", files=[],
    ).model_dump()  # fmt: skip
    manifest["files"] = [{"path": name, "size_bytes": len(data), "sha256": "0"} for name, data in files.items()]
    write_json(folder / "manifest.json", manifest)
    return folder


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    write_json(path, json.loads(path.read_text()) | changes)


def test_checkpoints_are_in_numeric_order_with_the_best_marked(run_dir: RunDir) -> None:
    for step, loss in ((1_000_000, 2.0), (10, 1.0), (2, 3.0), (100, 1.5)):
        write_checkpoint(run_dir, step, validation_loss=loss, validation_accuracy=loss / 10)
    found = read.checkpoints(run_dir)
    assert [entry["step"] for entry in found] == [2, 10, 100, 1_000_000]
    assert [entry["best"] for entry in found] == [False, True, False, False]
    assert found[0]["id"] == "step-000002"
    assert found[0]["size_bytes"] == 14
    assert [f["path"] for f in found[0]["files"]] == ["model/model.safetensors", "model/sub/config.json", "state/0.distcp"]
    best = [e["step"] for e in read.checkpoints(run_dir, best_metric="validation_accuracy") if e["best"]]
    assert best == [2]
    assert not any(e["best"] for e in read.checkpoints(run_dir, best_metric="loss"))


def altered(folder: Path, weights: Path) -> dict[str, dict[str, Any]]:
    (folder.parent / "outside").write_bytes(b"12345")
    return {
        "way out": {"files": [{"path": "model/../../outside", "size_bytes": 5, "sha256": "0"}]},
        "absolute": {"files": [{"path": str(weights), "size_bytes": 7, "sha256": "0"}]},
        "another id": {"id": "step-000001"},
        "no files": {"files": None},
        "odd file": {"files": ["model/model.safetensors"]},
        "odd step": {"step": "many"},
    }


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model" / "model.safetensors"
    match how:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "torn manifest":
            (folder / "manifest.json").write_text('{"id": "step-0')
        case "truncated":
            weights.write_bytes(b"wei")
        case "missing":
            weights.unlink()
        case "link":
            weights.rename(folder / "elsewhere")
            weights.symlink_to(folder / "elsewhere")
        case "linked folder":
            (folder / "model").rename(folder / "other")
            (folder / "model").symlink_to(folder / "other")
        case _:
            change_manifest(folder, **altered(folder, weights)[how])


@pytest.mark.parametrize(
    "how",
    ["no manifest", "torn manifest", "truncated", "missing", "link", "linked folder", "way out", "absolute", "another id",
     "no files", "odd file", "odd step"],
)  # fmt: skip
def test_an_incomplete_or_altered_checkpoint_is_none(run_dir: RunDir, how: str) -> None:
    write_checkpoint(run_dir, 10)
    folder = write_checkpoint(run_dir, 20)
    assert len(read.checkpoints(run_dir)) == 2
    spoil(folder, how)
    assert [entry["step"] for entry in read.checkpoints(run_dir)] == [10]
    with pytest.raises(NotFound):
        read.checkpoint_file(run_dir, "step-000020", "model/model.safetensors")


def test_only_listed_files_of_the_model_can_be_downloaded(run_dir: RunDir) -> None:
    folder = write_checkpoint(run_dir, 10)
    (folder / "model" / "unlisted").write_text("x")
    path, size = read.checkpoint_file(run_dir, "step-000010", "model/sub/config.json")
    assert (path, size) == ((folder / "model/sub/config.json").resolve(), 2)
    assert [f[0] for f in read.checkpoint_files(run_dir, "step-000010")] == ["model/model.safetensors", "model/sub/config.json"]
    for bad in ("model/unlisted", "state/0.distcp", "manifest.json", "model", "", "../x", "/etc/passwd", "model/../state/0.distcp"):
        with pytest.raises(NotFound, match="has no file"):
            read.checkpoint_file(run_dir, "step-000010", bad)
    for bad in ("step-000011", "../checkpoints/step-000010", "step-10", ""):
        with pytest.raises(NotFound):
            read.checkpoint_files(run_dir, bad)
