"""When the loop begins, waits for and tells of checkpoints that are written beside training."""

from __future__ import annotations

import math

import pytest

from posttrain_trainer.contract.errors import DiskFull, NonFiniteLoss

from .test_loop import Stop, bench, manifest


class Slow:
    """A checkpoint in the making, which is complete after it was looked at so many times."""

    waited, seconds, blocked_s = False, 2.0, 0.1

    def __init__(self, step: int, looks: float = math.inf, error: Exception | None = None) -> None:
        self.step = step
        self.looks = looks
        self.error = error
        self.asked = False
        self.let = False

    @property
    def over(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    @property
    def failed(self) -> bool:
        return self.error is not None and self.looks < 0

    def result(self):
        self.asked = True
        if self.error is not None:
            raise self.error
        return manifest(self.step)

    def let_end(self) -> None:
        self.let = True




@pytest.fixture
def run():
    """Runs a bench whose background saves are the given ones; returns the bench with the events that it told."""

    def go(*slow, steps=6, **knobs):
        b = bench(steps, **{"save_every_steps": 2, **knobs})
        b.slow = [lambda step, one=one: Slow(step, **one) for one in slow]
        b.told = []
        tell = b.events.tell
        b.events.tell = lambda kind, message, **data: (b.told.append((kind, data.get("step"), message)), tell(kind, message, **data))
        return b

    return go


def test_training_goes_on_and_the_end_waits(run):
    b = run({}, {})
    want, progress = b.run()
    assert (want, progress.step) == (None, 6)
    assert b.saved == [("steps", 2, False), ("steps", 4, False), ("end", 6, False)]
    assert [saving.asked for saving in b.savings[:2]] == [True, True]
    assert [(kind, step) for kind, step, _ in b.told if kind == "checkpoint"] == [("checkpoint", 2), ("checkpoint", 4), ("checkpoint", 6)]
    assert "0.1 s of it without training" in next(message for kind, _, message in b.told if kind == "checkpoint")
    assert b.loop.newest.step == 6
    assert b.rooms == [1]


def test_one_that_is_done_is_told_of_at_the_next_step(run):
    b = run({"looks": 1}, steps=5, save_every_steps=3)
    b.run()
    assert [point.step for point in b.points] == [1, 2, 3, 4, 5]
    assert [(kind, step) for kind, step, _ in b.told if kind == "checkpoint"] == [("checkpoint", 3), ("checkpoint", 5)]


def test_one_that_fails_ends_the_run_with_its_error_at_the_step_where_ranks_agree(run):
    b = run({"looks": 1, "error": DiskFull("no room")}, steps=8)
    with pytest.raises(DiskFull, match="no room"):
        b.run()
    assert len(b.points) == 4  # it failed during step 3, after the ranks had compared notes


def test_one_that_fails_late_ends_the_run_at_its_end(run):
    b = run({"error": DiskFull("no room")}, steps=3)
    with pytest.raises(DiskFull, match="no room"):
        b.run()
    assert b.saved == [("steps", 2, False)]


def test_a_stop_waits_and_saves_nothing_twice(run):
    b = run({}, stop=Stop(2))
    assert b.run()[0] == "pause"
    b = run({}, stop=Stop(3))
    assert b.run()[0] == "pause"
    assert b.saved == [("steps", 2, False), ("stop", 3, False)]
    assert b.savings[0].asked


def test_a_run_that_fails_gives_one_that_is_nearly_there_its_time(run):
    b = run({}, losses=[1.0, 1.0, math.nan, math.nan], max_skipped_steps=0)
    with pytest.raises(NonFiniteLoss):
        b.run()
    assert b.savings[0].let
    assert not b.savings[0].asked


@pytest.mark.parametrize(
    ("knobs", "rooms"),
    [
        ({"save_every_steps": 0}, []),
        ({"save_every_steps": 6}, []),
        ({"save_every_steps": 5}, [1]),
        ({"save_every_steps": 0, "save_every_epoch": True}, [1]),
        ({"save_every_steps": 0, "save_every_epoch": True, "steps_per_epoch": 6}, []),
        ({"save_every_steps": 0, "save_samples": 8}, [1]),
    ],
)
def test_room_is_taken_only_where_a_checkpoint_comes_before_the_end(run, knobs, rooms):
    b = run(**knobs)
    b.run()
    assert b.rooms == rooms
