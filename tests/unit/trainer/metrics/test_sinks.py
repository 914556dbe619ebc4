"""Sinks: lines that can be read at once, and a failing sink that costs nothing but its own points."""

import json
import os

import pytest

from posttrain_trainer.contract.events import MetricsPoint, RunEvent
from posttrain_trainer.metrics.jsonl import EventLog, JsonlSink
from posttrain_trainer.metrics.sink import FanOut
from posttrain_trainer.metrics.tensorboard import TensorboardSink


def point(step: int, **values) -> MetricsPoint:
    return MetricsPoint(attempt=1, step=step, epoch=0.5, time=100.0, **values)


class Memory:
    name = "memory"

    def __init__(self, fails_at: int | None = None, fails_on_close: bool = False) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.end = ""
        self._fails_at = fails_at
        self._fails_on_close = fails_on_close

    def write(self, point: MetricsPoint) -> None:
        if point.step == self._fails_at:
            raise ConnectionError("the server is down")
        self.steps.append(point.step)

    def close(self, end: str = "completed") -> None:
        if self._fails_on_close:
            raise OSError("cannot flush")
        self.closed, self.end = True, end


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(point(1, loss=2.5))
    sink.write(point(2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    sink.close()
    assert json.loads(lines[0]) == {"v": 1, "attempt": 1, "step": 1, "epoch": 0.5, "time": 100.0, "loss": 2.5}
    assert "loss" not in json.loads(lines[1])


def test_appending_keeps_what_was_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path)
        sink.write(point(step))
        sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_torn_line_does_not_spoil_the_next(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(OSError, match="only 10 of"):
            sink.write(point(1))
    sink.write(point(2))
    sink.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2


def test_a_failing_sink_is_told_about_once_and_the_others_go_on():
    good, bad, told = Memory(), Memory(fails_at=2), []
    fan = FanOut([bad, good], told.append)
    for step in (1, 2, 3):
        fan.write(point(step))
    fan.close()
    assert good.steps == [1, 2, 3]
    assert good.closed
    assert bad.steps == [1]
    assert len(told) == 1
    assert "memory" in told[0]
    assert "the server is down" in told[0]


def test_a_sink_that_fails_on_closing_does_not_keep_others_open():
    good, bad, told = Memory(), Memory(fails_on_close=True), []
    FanOut([bad, good], told.append).close("stopped")
    assert (good.closed, good.end) == (True, "stopped")
    assert len(told) == 1
    assert "cannot flush" in told[0]


def test_a_broken_sink_becomes_one_warning_event(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", attempt=3)
    fan = FanOut([Memory(fails_at=1)], log.warn)
    fan.write(point(1))
    fan.write(point(2))
    log.close()
    events = [RunEvent.model_validate_json(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event.type, event.level, event.attempt) for event in events] == [("warning", "warn", 3)]
    assert log.warnings == [events[0].message]


def test_the_same_warning_is_told_once(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", attempt=1)
    log.warn("slow")
    log.warn("slow")
    log.tell("data", "12 samples", samples=12)
    log.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["type"] for event in events] == ["warning", "data"]
    assert events[1]["data"] == {"samples": 12}


def test_events_that_cannot_be_written_are_still_printed(tmp_path, monkeypatch, capfd):
    log = EventLog(tmp_path / "events.jsonl", attempt=1)

    def full(_fd, _data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.warn("careful")
    log.close()
    out, err = capfd.readouterr()
    assert "careful" in out
    assert "No space left" in err


def test_ranks_without_a_file_only_print(capfd):
    EventLog(None, attempt=1).tell("phase", "loading")
    assert "loading" in capfd.readouterr().out


def test_tensorboard_gets_every_number(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorboardSink(tmp_path)
    sink.write(point(1, loss=2.0, tokens=10))
    sink.write(point(2, loss=1.5))
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.5)]
    assert "train/attempt" not in events.Tags()["scalars"]
