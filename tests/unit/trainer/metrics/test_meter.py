"""Measuring: sums over micro-batches and ranks, times, pace, the heartbeat."""

import json
import math

import pytest
import torch

from posttrain_trainer.metrics import meter
from posttrain_trainer.metrics.heartbeat import Heart
from posttrain_trainer.metrics.meter import Pace, Stopwatch, Sums, finite


class TwoRanks:
    """A World of two ranks that hold the same values."""

    def sum(self, values):
        return [2 * value for value in values]


def test_means_are_taken_once_over_all_micro_batches_and_ranks():
    sums = Sums(torch.device("cpu"))
    sums.add(torch.tensor(6.0, requires_grad=True), torch.tensor(1))
    sums.add(torch.tensor(4.0), torch.tensor(2))
    totals = sums.over_ranks(TwoRanks(), 20, [1.0, 0.0])
    assert totals.loss == pytest.approx(1.0)  # 2 ranks x 10 over 20 tokens
    assert totals.accuracy == pytest.approx(0.3)
    assert totals.flags == (2.0, 0.0)


def test_a_loss_that_is_not_finite_stays_so():
    sums = Sums(torch.device("cpu"))
    sums.add(torch.tensor(math.nan), torch.tensor(0))
    assert math.isnan(sums.over_ranks(TwoRanks(), 1).loss)
    assert finite(math.nan) is None
    assert finite(-math.inf) is None
    assert finite(0.0) == 0.0


def clock(monkeypatch, *times):
    ticks = iter(times)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(ticks))


def test_parts_of_a_step_add_up(monkeypatch):
    clock(monkeypatch, 0.0, 1.0, 3.0, 3.0, 4.0, 4.0, 4.5, 10.0)
    watch = Stopwatch(in_step_with_host=True)
    with watch.part("forward"):
        pass
    with watch.part("backward"):
        pass
    with watch.part("forward"):
        pass
    assert watch.parts() == {"forward": 2.5, "backward": 1.0}
    assert watch.total() == 10.0


def test_a_device_that_queues_work_tells_only_what_can_be_told(monkeypatch):
    clock(monkeypatch, 0.0, 0.0, 1.0, 1.0, 9.0)
    watch = Stopwatch(in_step_with_host=False)
    with watch.part("data"):
        pass
    with watch.part("forward"):
        pass
    assert watch.parts() == {"data": 1.0}


def test_pace_is_that_of_the_last_steps():
    pace = Pace()
    assert pace.tokens_per_s is None
    assert pace.eta_s(5) is None
    pace.add(100.0, 1)  # a slow first step is forgotten
    for _ in range(20):
        pace.add(2.0, 100)
    assert pace.tokens_per_s == pytest.approx(50.0)
    assert pace.eta_s(10) == pytest.approx(20.0)


def test_a_new_phase_is_written_at_once_and_beats_in_between_are_thinned(tmp_path, monkeypatch):
    from posttrain_trainer.metrics import heartbeat

    now = 1000.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    path = tmp_path / "heartbeat.json"
    heart = Heart(path)

    def written():
        data = json.loads(path.read_text())
        return data["phase"], data["step"]

    heart.beat("import")
    assert written() == ("import", 0)
    heart.beat("train", step=1)
    assert written() == ("train", 1)
    heart.beat("train", step=2)
    assert written() == ("train", 1)
    now += 0.2
    heart.beat("train", step=3)
    assert written() == ("train", 3)
    heart.beat("train", step=4)
    heart.flush()
    assert written() == ("train", 4)


def test_other_fields_stay_between_beats(tmp_path):
    heart = Heart(tmp_path / "heartbeat.json")
    heart.beat("train", step=7, total_steps=9)
    heart.beat("save")
    data = json.loads((tmp_path / "heartbeat.json").read_text())
    assert (data["phase"], data["step"], data["total_steps"]) == ("save", 7, 9)


def test_a_heartbeat_that_cannot_be_written_does_not_stop_training(tmp_path, capfd):
    Heart(tmp_path / "missing" / "heartbeat.json").beat("train")
    assert "heartbeat.json could not be written" in capfd.readouterr().err
