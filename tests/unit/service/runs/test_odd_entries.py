"""What a program may put into its run's folder: pipes, links, folders and records that break readers."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from posttrain_service.runs import read, tail
from posttrain_service.wire.metrics import point_json
from posttrain_trainer.contract import locks, logcap, rundir
from posttrain_trainer.contract.folders import remove_tree
from posttrain_trainer.contract.plainfile import NotPlain, open_plain
from posttrain_trainer.contract.rundir import RunDir, read_json

HUGE = "1" + "0" * 400


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    target = path.with_name("target-of-link")
    target.write_text('{"step": 1, "loss": 7.0}\n')
    path.symlink_to(target)


def loop(path: Path) -> None:
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.mkdir()


ODD = pytest.mark.parametrize("make", [pipe, link, loop, folder])


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "attempts/1/logs").mkdir(parents=True)
    return RunDir(tmp_path)


@ODD
def test_a_record_that_is_no_plain_file_is_refused_at_once(run_dir: RunDir, make) -> None:
    make(run_dir.attempt(1).heartbeat)
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(run_dir.attempt(1).heartbeat)
    with pytest.raises(NotPlain):
        open_plain(run_dir.attempt(1).heartbeat)
    assert read.progress(run_dir, 1) is None


@ODD
def test_metrics_that_are_no_plain_file_are_none(run_dir: RunDir, make) -> None:
    make(run_dir.attempt(1).metrics)
    assert read.metrics(run_dir) == []
    assert read.latest(run_dir) is None


@ODD
def test_a_log_that_is_no_plain_file_is_absent(run_dir: RunDir, make) -> None:
    make(run_dir.attempt(1).rank_log(0))
    run_dir.attempt(1).rank_log(1).write_bytes(b"x")
    assert run_dir.attempt(1).log_sources() == ["rank-1"]
    assert tail.read(run_dir.attempt(1).rank_log(0), 0, 100).data == b""
    assert tail.tail(run_dir.attempt(1).rank_log(0), 10).data == b""


@ODD
def test_a_manifest_that_is_no_plain_file_makes_no_checkpoint(run_dir: RunDir, make) -> None:
    run_dir.checkpoint("step-000001").mkdir(parents=True)
    make(run_dir.checkpoint("step-000001") / "manifest.json")
    assert read.checkpoints(run_dir) == []


@pytest.mark.parametrize("name", ["²", "٣", "0", "-1", "01", "9" * 200, "x"])
def test_only_our_own_names_are_attempts_and_checkpoints(run_dir: RunDir, name: str) -> None:
    (run_dir.path / "attempts" / name).mkdir()
    (run_dir.path / "checkpoints" / f"step-00000{name}").mkdir(parents=True)
    (run_dir.path / "checkpoints" / f"step-00000{name}" / "manifest.json").write_text("{}")
    assert [attempt.number for attempt in run_dir.attempts()] == [1]
    assert read.latest(run_dir) is None
    assert read.checkpoints(run_dir) == []


def test_files_where_folders_belong_hold_nothing(run_dir: RunDir) -> None:
    (run_dir.path / "attempts/2").write_text("")
    (run_dir.path / "checkpoints").write_text("")
    assert read.latest(run_dir) is None
    assert read.metrics(run_dir) == []
    assert read.progress(run_dir, 2) is None
    assert read.checkpoints(run_dir) == []
    assert run_dir.attempt(2).log_sources() == []


@pytest.mark.parametrize("line", ["[" * 200_000, '{"step": ' + HUGE + "}", '{"step": 1' + "0" * 5000 + "}", "[" + "1," * 10**6 + "1]"])
def test_a_line_of_metrics_that_breaks_readers_is_no_point(run_dir: RunDir, line: str) -> None:
    run_dir.attempt(1).metrics.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2, "time": {HUGE}}}\n')
    points = read.metrics(run_dir)
    assert [point["step"] for point in points] == [1, 2]
    assert read.latest(run_dir) == points[1]
    assert point_json(points[1])["time"] is None


def test_deep_and_long_records_are_refused(run_dir: RunDir, monkeypatch) -> None:
    path = run_dir.attempt(1).result
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path)
    monkeypatch.setattr(rundir, "MAX_RECORD_BYTES", 10)
    path.write_text("[1234567890]")
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        read_json(path)


@pytest.mark.parametrize("metrics", ['{"validation_loss": ' + HUGE + "}", "[1]", '"x"', '{"validation_loss": "low"}', '{"a": 1e999}'])
def test_odd_metrics_of_a_manifest_are_left_out(run_dir: RunDir, metrics: str) -> None:
    checkpoint = run_dir.checkpoint("step-000001")
    checkpoint.mkdir(parents=True)
    manifest = {"id": "step-000001", "files": [], "step": 1, "epoch": 0.5, "created_at": 1.0}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest)[:-1] + f', "metrics": {metrics}}}')
    (found,) = read.checkpoints(run_dir)
    assert (found["metrics"], found["best"]) == ({}, False)


@pytest.mark.parametrize("change", [{"created_at": 1e18}, {"step": 1.5}, {"epoch": 10**400}, {"created_at": 10**400}])
def test_a_manifest_with_impossible_numbers_makes_no_checkpoint(run_dir: RunDir, change) -> None:
    checkpoint = run_dir.checkpoint("step-000001")
    checkpoint.mkdir(parents=True)
    manifest = {"id": "step-000001", "files": [], "step": 1, "epoch": 0.5, "created_at": 1.0}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | change))
    assert read.checkpoints(run_dir) == []


def test_progress_of_impossible_numbers_has_no_percent() -> None:
    assert read.with_percent({"step": 10**400, "total_steps": 5})["percent"] is None
    assert read.with_percent({"step": 1, "total_steps": 10**400})["percent"] is None


def test_many_may_remove_one_folder_at_a_time(tmp_path: Path) -> None:
    for round_ in range(5):
        target = tmp_path / f"r{round_}"
        for n in range(20):
            (target / f"{n}/deep").mkdir(parents=True)
            (target / f"{n}/deep/file").write_text("x")
        faults: list[BaseException] = []
        start = threading.Barrier(6)

        def remove(target=target, faults=faults, start=start) -> None:
            start.wait()
            try:
                remove_tree(target)
            except OSError as error:
                faults.append(error)

        threads = [threading.Thread(target=remove) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert not target.exists()


def test_what_cannot_be_removed_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        remove_tree(tmp_path / "file")


def fill(attempt: Path) -> None:
    (attempt / "logs").mkdir(parents=True)
    for name in ("heartbeat.json", "error-rank-0.json"):
        (attempt / name).write_text('{"step": 1, "total_steps": 2}')
    (attempt / "metrics.jsonl").write_text('{"step": 1, "loss": 7.0}\n')
    for name in ("logs/rank-0.log", "logs/torchrun.log", "shim.lock", "run.lock"):
        (attempt / name).write_text("secret")


LINKED = pytest.mark.parametrize("part", ["attempts", "attempts/1", "attempts/1/logs"])


@LINKED
def test_no_reader_follows_a_linked_folder_out_of_the_run(tmp_path: Path, part: str) -> None:
    run = RunDir(tmp_path / "run")
    fill(run.attempt(1).path)
    outside = tmp_path / "outside"
    (run.path / part).rename(outside)
    (run.path / part).symlink_to(outside)
    paths = run.attempt(1)
    assert paths.torchrun_log.read_text() == "secret", "the link itself works"
    assert paths.log_sources() == []
    for log in (paths.rank_log(0), paths.torchrun_log):
        assert tail.tail(log, 5).data == tail.read(log, 0, 100).data == tail.read_end(log, 9).data == b""
        with pytest.raises(NotPlain):
            open_plain(log)
        with pytest.raises(OSError) as caught:
            logcap.cap(log, 1)
        assert caught.value.errno == errno.ELOOP
    assert (outside / {"attempts": "1/logs", "attempts/1": "logs"}.get(part, "") / "rank-0.log").read_text() == "secret"
    if part == "attempts/1/logs":
        assert read.metrics(run) != []
        return
    assert read.metrics(run) == []
    assert read.latest(run) is None
    assert read.progress(run, 1) is None
    assert paths.errors() == []
    assert run.attempts() == ([] if part == "attempts" else [paths])
    for lock in (paths.shim_lock, paths.run_lock):
        for act in (locks.is_held, locks.Lock):
            with pytest.raises(OSError) as caught:
                act(lock)
            assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step-000001", "checkpoints/step-000001/model"])
def test_no_checkpoint_stands_behind_a_link(tmp_path: Path, part: str) -> None:
    run = RunDir(tmp_path / "run")
    folder = run.checkpoint("step-000001")
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text("{}")
    files = [{"path": "model/config.json", "size_bytes": 2, "sha256": "0" * 64}]
    manifest = {"id": "step-000001", "step": 1, "epoch": 1, "created_at": 1.0, "files": files}
    rundir.write_json(folder / "manifest.json", manifest)
    [(_, path, _)] = read.checkpoint_files(run, "step-000001")
    os.close(open_plain(path))
    (run.path / part).rename(tmp_path / "outside")
    (run.path / part).symlink_to(tmp_path / "outside")
    assert read.checkpoints(run) == []
    with pytest.raises(NotPlain):
        open_plain(path)


def test_links_above_the_run_belong_to_the_operator(tmp_path: Path) -> None:
    fill(tmp_path / "disk/jobs/attempts/1")  # also where its folders have the names of a run's
    (tmp_path / "storage").symlink_to(tmp_path / "disk")
    run = RunDir(tmp_path / "storage/jobs")
    assert run.attempt(1).log_sources() == ["torchrun", "rank-0"]
    assert read.progress(run, 1)
    assert locks.is_held(run.attempt(1).shim_lock) is False
    nested = tmp_path / "attempts/1/link"
    nested.parent.mkdir(parents=True)
    nested.symlink_to(tmp_path / "disk")
    assert RunDir(nested / "jobs").attempt(1).log_sources() == ["torchrun", "rank-0"]
