"""Every state's time, and what has outlived it."""

import pytest

from posttrain_service.domain.deadlines import Limits, is_overdue, on_entry, stop_grace_s
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.domain.retention import expires_at, is_expired, outlived
from posttrain_service.settings import Settings


@pytest.mark.parametrize(
    ("to", "fields", "deadline"),
    [
        ("queued", {}, 1200.0),
        ("queued", {"queue_ttl_s": 5.0}, 205.0),
        ("launching", {}, 260.0),
        ("running", {}, None),
        ("running", {"max_duration_s": 50.0}, 250.0),
        ("stopping", {}, 240.0),
        ("paused", {}, 5200.0),
        ("succeeded", {}, None),
        ("failed", {}, None),
        ("cancelled", {}, None),
    ],
)
def test_deadline_of_each_state(make_job, limits, to, fields, deadline):
    changes = on_entry(make_job("queued", **fields), JobState(to), 200.0, limits)
    assert changes["deadline_at"] == deadline
    assert ("expires_at" in changes) == (to in ("succeeded", "failed", "cancelled"))


def test_a_launch_is_a_new_attempt(make_job, limits):
    changes = on_entry(make_job("queued", attempt=2, started_at=1.0), JobState.LAUNCHING, 200.0, limits)
    assert changes["attempt"] == 3
    assert changes["launched_at"] == 200.0
    assert changes["started_at"] is None


def test_grace_of_a_pause_follows_the_last_save(limits, make_job):
    assert stop_grace_s("cancel", limits, 100.0) == 30
    assert stop_grace_s("pause", limits, None) == 30
    assert stop_grace_s("pause", limits, 5.0) == 30
    assert stop_grace_s("pause", limits, 100.0) == 300
    assert on_entry(make_job(), JobState.STOPPING, 200.0, limits, grace_s=300.0)["deadline_at"] == 510.0


def test_overdue(make_job):
    assert not is_overdue(make_job(deadline_at=None), 1e12)
    assert not is_overdue(make_job(deadline_at=5.0), 4.9)
    assert is_overdue(make_job(deadline_at=5.0), 5.0)


def test_limits_come_from_the_settings(tmp_path):
    limits = Limits.of(Settings(storage_dir=tmp_path, heartbeat_train_s=7, stop_grace_s=3))
    assert limits.heartbeat_s["train"] == 7
    assert limits.stop_grace_s == 3
    assert set(limits.heartbeat_s) == {"import", "load", "data", "compile", "train", "validate", "save"}


def test_retention(make_job):
    assert expires_at(make_job(), 100.0, 50.0) == 150.0
    assert expires_at(make_job(ttl_s=7.0), 100.0, 50.0) == 107.0
    assert expires_at(make_job(keep=True, ttl_s=None), 100.0, 50.0) is None
    assert is_expired(make_job("failed", expires_at=5.0), 5.0)
    assert not is_expired(make_job("failed", expires_at=5.0), 4.0)
    assert not is_expired(make_job("failed", expires_at=None), 1e12)
    assert not is_expired(make_job("failed", expires_at=5.0, keep=True), 6.0)
    assert not is_expired(make_job("running", expires_at=5.0), 6.0)
    jobs = [make_job("failed", run_id="b", expires_at=3.0), make_job("succeeded", run_id="a", expires_at=1.0)]
    assert [job.run_id for job in outlived([*jobs, make_job("queued")], 5.0)] == ["a", "b"]
