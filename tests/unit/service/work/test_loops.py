"""Loops: rounds, hints, failures."""

import logging
import threading

from posttrain_service.work.hints import Hint
from posttrain_service.work.loops import Loop


def test_a_hint_is_used_up_by_one_wait():
    hint = Hint()
    hint.give()
    assert hint.wait(0)
    assert not hint.wait(0)


def test_a_hint_makes_the_next_round_early_and_stop_ends_the_thread():
    rounds = threading.Semaphore(0)
    hint = Hint()
    loop = Loop("test", rounds.release, hint, interval_s=3600)
    loop.start()
    assert rounds.acquire(timeout=10)
    hint.give()
    assert rounds.acquire(timeout=10)
    assert loop.is_alive()
    assert loop.stop()
    assert not loop.is_alive()


def test_a_failing_round_is_logged_and_the_next_one_is_made(caplog):
    calls = []

    def step():
        calls.append(1)
        if len(calls) == 1:
            raise OSError("disk gone")
        return None

    loop = Loop("test", step, Hint(), interval_s=1)
    with caplog.at_level(logging.ERROR):
        assert loop.round() == 1
    assert loop.last_error == "OSError: disk gone"
    assert "a round of the test failed (1 in a row)" in caplog.text
    assert loop.round() == 1
    assert loop.last_error is None


def test_failures_in_a_row_wait_longer_each_time(caplog):
    def step():
        raise OSError("no")

    loop = Loop("test", step, Hint(), interval_s=1)
    assert [loop.round() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_round_may_want_the_next_one_sooner_but_not_later():
    wanted = iter([0.1, 7.0])
    loop = Loop("test", lambda: next(wanted), Hint(), interval_s=1)
    assert [loop.round(), loop.round()] == [0.1, 1]
