"""The supervisor's judgement, as a table of (job, look, time) -> action."""

import pytest

from posttrain_service.domain.decide import Act, decide, is_retried, stop_want
from posttrain_service.domain.job import RetryPolicy
from posttrain_service.domain.lifecycle import LIVE, EndReason, JobState

DONE = {"status": "completed", "steps": 10, "total_steps": 10}
EXITED = {"reason": "exited", "exit_code": 0}


@pytest.mark.parametrize("state", sorted(LIVE))
@pytest.mark.parametrize("now", [200.0, 1e12])
def test_unknown_waits_however_late_it_is(make_job, look, limits, state, now):
    job = make_job(state, deadline_at=150.0, want="cancel" if state == "stopping" else None)
    assert decide(job, look(liveness="unknown"), now, limits).act is Act.WAIT
    assert decide(job, look(liveness="unknown", started=False), now, limits).act is Act.WAIT


def test_a_launch_is_confirmed_by_what_is_seen(make_job, look, limits):
    job = make_job("launching", launched_at=100.0, deadline_at=160.0, max_duration_s=500.0)
    action = decide(job, look(), 101.0, limits)
    assert (action.act, action.to) == (Act.CONFIRM, JobState.RUNNING)
    assert action.changes == {"started_at": 101.0, "deadline_at": 601.0}
    [event] = action.events
    assert (event.type, event.data) == ("running", {"attempt": 1})


@pytest.mark.parametrize(
    ("liveness", "now", "act"),
    [
        ("dead", 101.0, Act.WAIT),  # the shim may be coming up
        ("dead", 104.9, Act.WAIT),
        ("dead", 105.0, Act.START),  # the server may have died between claim and start
        ("dead", 159.9, Act.START),
        ("dead", 160.0, Act.FINISH),
        ("alive", 159.9, Act.WAIT),
        ("alive", 160.0, Act.FINISH),
    ],
)
def test_a_launch_that_does_not_come_up(make_job, look, limits, liveness, now, act):
    job = make_job("launching", launched_at=100.0, deadline_at=160.0)
    action = decide(job, look(liveness=liveness, started=False), now, limits)
    assert action.act is act
    if act is Act.FINISH:
        assert (action.to, action.changes["reason"]) == (JobState.FAILED, EndReason.START_TIMEOUT)
        assert action.sweep
        assert action.stop_want == "cancel"
        assert action.changes["expires_at"] == now + limits.retention_ttl_s


def test_a_launch_that_ended_at_once(make_job, look, limits):
    job = make_job("launching", launched_at=100.0, deadline_at=160.0)
    assert decide(job, look("dead", exit=EXITED, result=DONE), 101.0, limits).to is JobState.SUCCEEDED
    broken = {"reason": "launch_failed", "exit_code": None, "message": "no such file"}
    action = decide(job, look("dead", exit=broken), 101.0, limits)
    assert (action.to, action.changes["reason"]) == (JobState.FAILED, EndReason.LAUNCH_FAILED)
    # Pre-empted within the first second: the way to paused leads through running.
    paused = look("dead", exit={"reason": "stopped"}, result={"status": "stopped", "want": "pause"})
    assert decide(job, paused, 101.0, limits).to is JobState.RUNNING


@pytest.mark.parametrize(
    ("phase", "silent_s", "act"),
    [("import", 100, Act.WAIT), ("import", 101, Act.STOP), ("train", 50, Act.WAIT), ("train", 51, Act.STOP),
     ("save", 300, Act.WAIT), ("save", 301, Act.STOP), ("novel", 300, Act.WAIT), ("novel", 301, Act.STOP)],
)  # fmt: skip
def test_heartbeat_limits_by_phase(make_job, look, limits, phase, silent_s, act):
    job = make_job("running", started_at=110.0)
    action = decide(job, look(heartbeat={"time": 200.0, "phase": phase}), 200.0 + silent_s, limits)
    assert action.act is act
    if act is Act.STOP:
        assert (action.to, action.changes["reason"]) == (JobState.STOPPING, EndReason.HEARTBEAT_TIMEOUT)
        assert action.stop_want == "cancel"
        assert "want" not in action.changes, "nobody asked for it"


def test_without_a_heartbeat_the_start_counts(make_job, look, limits):
    job = make_job("running", started_at=110.0)
    assert decide(job, look(), 210.0, limits).act is Act.WAIT
    assert decide(job, look(), 210.1, limits).act is Act.STOP


def test_a_run_past_its_duration_saves_and_stops(make_job, look, limits):
    job = make_job("running", started_at=110.0, max_duration_s=90.0, deadline_at=200.0)
    beat = {"time": 199.0, "phase": "train"}
    assert decide(job, look(heartbeat=beat), 199.9, limits).act is Act.WAIT
    action = decide(job, look(heartbeat=beat), 200.0, limits)
    assert (action.act, action.to, action.stop_want) == (Act.STOP, JobState.STOPPING, "pause")
    assert action.changes == {"deadline_at": 240.0, "reason": EndReason.MAX_DURATION}
    stopping = make_job("stopping", reason=EndReason.MAX_DURATION, deadline_at=240.0)
    assert stop_want(stopping) == "pause"
    saved = look("dead", exit={"reason": "stopped", "stop_want": "pause"}, result={"status": "stopped", "want": "pause"})
    end = decide(stopping, saved, 205.0, limits)
    assert (end.to, end.changes["reason"]) == (JobState.FAILED, EndReason.MAX_DURATION)


@pytest.mark.parametrize("want", ["cancel", "pause"])
def test_stopping_asks_again_then_kills(make_job, look, limits, want):
    job = make_job("stopping", want=want, deadline_at=240.0)
    action = decide(job, look(), 239.0, limits)
    assert (action.act, action.to, action.stop_want) == (Act.STOP, None, want)
    assert decide(job, look(), 240.0, limits).act is Act.SWEEP
    assert decide(job, look("dead", orphans=True), 201.0, limits).act is Act.SWEEP


@pytest.mark.parametrize("state", ["launching", "running"])
def test_orphans_are_swept_before_anything_is_judged(make_job, look, limits, state):
    job = make_job(state, deadline_at=150.0)
    assert decide(job, look("dead", orphans=True), 200.0, limits).act is Act.SWEEP
    action = decide(job, look("dead"), 201.0, limits)
    assert (action.act, action.to, action.changes["reason"]) == (Act.FINISH, JobState.FAILED, EndReason.LOST)
    assert action.sweep


def test_a_cancelled_launch_ends_without_waiting_for_its_deadline(make_job, look, limits):
    job = make_job("stopping", want="cancel", deadline_at=240.0)
    action = decide(job, look("dead", started=False), 101.0, limits)
    assert (action.act, action.to, action.sweep, action.stop_want) == (Act.FINISH, JobState.CANCELLED, True, "cancel")


def test_a_stop_request_laid_by_hand_leads_through_stopping(make_job, look, limits):
    seen = look("dead", exit={"reason": "stopped", "stop_want": "cancel"})
    first = decide(make_job("running"), seen, 200.0, limits)
    assert (first.act, first.to, first.changes["want"]) == (Act.STOP, JobState.STOPPING, "cancel")
    then = decide(make_job("stopping", want="cancel"), seen, 201.0, limits)
    assert then.to is JobState.CANCELLED


def test_waiting_states_end_by_time(make_job, limits):
    queued = make_job("queued", deadline_at=200.0)
    assert decide(queued, None, 199.9, limits).act is Act.WAIT
    action = decide(queued, None, 200.0, limits)
    assert (action.act, action.to, action.sweep) == (Act.FINISH, JobState.FAILED, False)
    assert action.changes["reason"] is EndReason.QUEUE_TIMEOUT
    assert action.changes["error"]["code"] == "queue_timeout"
    paused = make_job("paused", deadline_at=200.0)
    assert decide(paused, None, 199.9, limits).act is Act.WAIT
    action = decide(paused, None, 200.0, limits)
    assert (action.to, action.changes["reason"]) == (JobState.CANCELLED, EndReason.PAUSED_EXPIRED)
    assert decide(make_job("failed", deadline_at=200.0), None, 300.0, limits).act is Act.WAIT


def test_the_end_keeps_progress_and_new_warnings(make_job, look, limits):
    job = make_job("running", warnings=["old"], keep=True)
    beat = {"time": 190.0, "phase": "train", "step": 10}
    seen = look("dead", exit=EXITED, result=DONE | {"warnings": ["old", "new", "new"]}, heartbeat=beat)
    action = decide(job, seen, 200.0, limits)
    assert action.changes["progress"] == beat
    assert action.changes["warnings"] == ["old", "new"]
    assert action.changes["expires_at"] is None, "kept for ever"
    assert [(e.type, e.level) for e in action.events] == [("warning", "warn"), ("succeeded", "info")]
    assert action.events[1].data["steps"] == 10


def test_retry_by_policy(make_job, look, limits):
    lost = look("dead")
    job = make_job("running", retry=RetryPolicy(max_attempts=2))
    action = decide(job, lost, 200.0, limits)
    assert (action.act, action.via, action.to) == (Act.FINISH, JobState.FAILED, JobState.QUEUED)
    assert action.sweep
    assert action.changes["deadline_at"] == 200.0 + limits.queue_ttl_s
    assert "reason" not in action.changes
    assert [e.type for e in action.events] == ["failed", "queued"]
    assert action.changes["retries"] == 1
    paused_before = make_job("running", attempt=7, retry=RetryPolicy(max_attempts=2))
    assert decide(paused_before, lost, 200.0, limits).to is JobState.QUEUED, "attempts after a pause are no failures"
    again = make_job("running", attempt=2, retries=1, retry=RetryPolicy(max_attempts=2))
    assert decide(again, lost, 200.0, limits).to is JobState.FAILED


def test_which_reasons_are_retried(make_job):
    job = make_job(retry=RetryPolicy(max_attempts=3))
    assert {r for r in EndReason if is_retried(job, r)} == {
        EndReason.LOST, EndReason.LAUNCH_FAILED, EndReason.START_TIMEOUT,
    }  # fmt: skip
    named = make_job(retry=RetryPolicy(max_attempts=3, on=("out_of_memory",)))
    assert {r for r in EndReason if is_retried(named, r)} == {EndReason.OUT_OF_MEMORY}
    assert not any(is_retried(make_job(), r) for r in EndReason)


@pytest.mark.parametrize(("result", "warned"), [({"status": "stopped", "want": "pause", "checkpoint": "step-000004"}, 0), (None, 1)])
def test_a_preempted_job_is_queued_again_by_itself(make_job, look, limits, result, warned):
    job = make_job("stopping", want="pause", reason=EndReason.PREEMPTED, deadline_at=150.0)
    action = decide(job, look("dead", exit={"reason": "stopped", "stop_want": "pause"}, result=result), 200.0, limits)
    assert (action.act, action.via, action.to) == (Act.FINISH, JobState.PAUSED, JobState.QUEUED)
    assert [e.type for e in action.events if e.type != "warning"] == ["paused", "queued"]
    assert action.events[-2].data["reason"] == "preempted"
    assert len(action.changes["warnings"]) == warned
    assert "retries" not in action.changes
    assert "reason" not in action.changes


def test_a_job_that_was_stopped_from_outside_stays_paused(make_job, look, limits):
    action = decide(make_job("running"), look("dead", exit={"reason": "stopped"}, result={"status": "stopped", "want": "pause"}), 200.0, limits)
    assert (action.to, action.via, action.changes["reason"]) == (JobState.PAUSED, None, EndReason.PREEMPTED)
