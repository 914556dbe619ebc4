"""Loggers are told how a run ended: completed, stopped or failed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from posttrain_trainer import build
from posttrain_trainer.contract.errors import NonFiniteLoss
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.metrics.heartbeat import Heart
from posttrain_trainer.metrics.jsonl import EventLog


class Sink:
    name = "memory"
    end = ""
    url = None

    def write(self, point):
        raise AssertionError(point)

    def close(self, end="completed"):
        self.end = end


def _trained(monkeypatch, tmp_path, loop):
    sink = Sink()
    model = SimpleNamespace(notes=[], warnings=[])
    monkeypatch.setattr(build, "open_sinks", lambda *_: [sink])
    monkeypatch.setattr(build, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(build, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(build, "replace", lambda parts, **_: parts)
    monkeypatch.setattr(build, "Loop", lambda *_: SimpleNamespace(run=loop))
    for name, value in {"_profile": SimpleNamespace(close=lambda _: None, step=None), "_data": (None,) * 3, "_resume": (SimpleNamespace(step=1), None)}.items():
        monkeypatch.setattr(build._Run, name, lambda *_, value=value: value)
    for name in ("_enter_load", "_checkpoints", "_parts", "_mfu", "_tell_plan"):
        monkeypatch.setattr(build._Run, name, lambda *_: None)
    monkeypatch.setattr(build._Run, "_result", lambda *_: "the result")
    heart, events = Heart(tmp_path / "heartbeat.json"), EventLog(tmp_path / "events.jsonl", 1)
    world = SimpleNamespace(is_main=True, device=None)
    run = build._Run(RunDir(tmp_path).attempt(1), None, world, events, heart, None, build.Startup(0.0))
    return sink, run


@pytest.mark.parametrize(("want", "end"), [(None, "completed"), ("pause", "stopped"), ("cancel", "stopped")])
def test_a_run_that_ends_in_order(monkeypatch, tmp_path, want, end):
    sink, run = _trained(monkeypatch, tmp_path, lambda: want)
    assert run.train() == "the result"
    assert sink.end == end


def test_pages_that_show_the_run_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(Sink, "url", "https://tracker.example/runs/1")
    _, run = _trained(monkeypatch, tmp_path, lambda: None)
    run.train()
    shown = {"kind": "memory", "url": "https://tracker.example/runs/1"}
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["type"], event["data"]) == ("tracker", shown)
    assert json.loads((tmp_path / "heartbeat.json").read_text())["trackers"] == [shown]


def test_a_run_that_fails(monkeypatch, tmp_path):
    def loop():
        raise NonFiniteLoss("no number")

    sink, run = _trained(monkeypatch, tmp_path, loop)
    with pytest.raises(NonFiniteLoss):
        run.train()
    assert sink.end == "failed"
