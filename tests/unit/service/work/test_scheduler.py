"""From the queue to a launch."""

import shutil
from types import SimpleNamespace

from posttrain_service.launch.backend import Liveness, Seen


def test_a_queued_job_is_launched_with_its_devices_and_number(bench):
    job = bench.submit()
    bench.runtime.loops[1].round()
    launched = bench.job(job)
    assert (launched.state, launched.attempt, launched.devices) == ("launching", 1, ["cpu:0"])
    assert launched.deadline_at == bench.clock.now() + bench.runtime.settings.launch_timeout_s
    assert bench.backend.named("start") == [("start", job.run_id, 1)]
    assert bench.taken() == ["cpu:0"]


def test_jobs_are_launched_by_priority_as_devices_come_free(make_bench):
    bench = make_bench(slots=("cpu:0", "cpu:1"))
    jobs = [bench.submit(resources={"priority": p}) for p in (0, 5, 1)]
    bench.rounds(2)
    assert [bench.job(job).state for job in jobs] == ["queued", "running", "running"]
    bench.ends(bench.job(jobs[1]), result={"status": "completed", "steps": 1})
    bench.rounds(2)
    assert [bench.job(job).state for job in jobs] == ["running", "succeeded", "running"]


def test_a_model_that_has_gone_fails_the_job_and_not_the_round(bench):
    first, second = bench.submit(), bench.submit(model="org/hub")
    shutil.rmtree(bench.runtime.settings.base_models_dir / "tiny")
    bench.rounds(3)
    failed = bench.job(first)
    assert (failed.state, failed.reason) == ("failed", "model_not_found")
    assert "tiny" in failed.error["message"]
    assert bench.job(second).state == "running"


def test_a_launch_that_fails_is_judged_by_its_deadline_and_frees_its_devices(bench):
    job = bench.submit()
    bench.backend.fails = True
    bench.rounds(2)
    assert bench.job(job).state == "launching"
    assert any(event.message == "no shim today" for event in bench.jobs.events(job.job_uuid).data)
    bench.clock.advance(bench.runtime.settings.launch_timeout_s)
    bench.rounds()
    assert (bench.job(job).state, bench.job(job).reason) == ("failed", "start_timeout")
    assert bench.taken() == []


def test_a_launch_that_was_lost_with_its_server_is_done_again(bench):
    job = bench.submit()
    bench.runtime.loops[1].round()
    bench.backend.seen.clear()
    bench.clock.advance(5.0)
    bench.rounds()
    assert bench.backend.named("start") == [("start", job.run_id, 1)] * 2
    bench.rounds()
    assert bench.job(job).state == "running"


def test_nothing_is_launched_while_the_disk_is_below_the_reserve(bench, monkeypatch, caplog):
    job = bench.submit()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=-1))
        bench.rounds(3)
    assert bench.job(job).state == "queued"
    assert caplog.text.count("nothing is launched") == 1
    bench.rounds()
    assert bench.job(job).state == "launching"


def test_only_the_leader_acts_and_a_dead_leader_is_succeeded_at_once(make_bench):
    first = make_bench()
    first.rounds()
    second = make_bench(backend=first.backend)
    job = second.submit()
    second.rounds(2)
    assert second.job(job).state == "queued"
    # As after kill -9: the lock is free, the lease in the database hasn't run out.
    first.runtime.leader._lock.release()
    second.rounds(2)
    assert second.job(job).state == "running"


def test_a_leader_that_was_taken_over_changes_nothing_any_more(make_bench):
    first = make_bench()
    job = first.submit()
    stale = first.runtime.leader.lease()
    first.runtime.leader._lock.release()
    second = make_bench(backend=first.backend)
    assert second.runtime.leader.lease().token == stale.token + 1
    first.runtime.loops[1].round()  # still believes that it leads
    assert first.job(job).state == "queued"
    assert first.backend.named("start") == []


def test_an_unseen_but_living_run_is_not_started_twice(bench):
    job = bench.submit()
    bench.backend.seen[job.run_id, 1] = Seen(Liveness.UNKNOWN)
    bench.rounds()
    bench.clock.advance(30)
    bench.rounds()
    assert len(bench.backend.named("start")) == 1
    assert bench.job(job).state == "launching"


SAVED = {"status": "stopped", "want": "pause", "checkpoint": "step-000002", "steps": 2}


def preempt(bench):
    """A job of low priority that was asked to make room for one of high priority."""
    low = bench.run()
    high = bench.submit(resources={"priority": 5})
    bench.rounds()
    assert (bench.job(low).state, bench.job(low).want, bench.job(low).reason) == ("stopping", "pause", "preempted")
    assert bench.backend.named("stop") == []
    bench.rounds()
    assert bench.backend.named("stop")[-1] == ("stop", low.run_id, 1, "pause")
    assert bench.job(high).state == "queued"
    return bench.job(low), high


def test_a_running_job_makes_room_and_goes_on_afterwards(make_bench):
    bench = make_bench(preemption=True)
    low, high = preempt(bench)
    bench.ends(low, 1, result=SAVED)
    bench.rounds(2)
    assert (bench.job(low).state, bench.job(high).state) == ("queued", "running")
    assert [t for t in bench.event_types(low) if t != "warning"][-3:] == ["stopping", "paused", "queued"]
    assert bench.taken() == ["cpu:0"]
    bench.ends(bench.job(high), result={"status": "completed", "steps": 1})
    bench.rounds(3)
    again = bench.job(low)
    assert (bench.job(high).state, again.state, again.attempt, again.retries) == ("succeeded", "running", 2, 0)


def test_without_the_setting_and_among_equals_nobody_is_paused(make_bench, bench):
    low = bench.run()
    bench.submit(resources={"priority": 5})
    bench.rounds(3)
    assert bench.job(low).state == "running"


def test_a_pause_during_a_preemption_holds(make_bench):
    bench = make_bench(preemption=True)
    low, high = preempt(bench)
    assert bench.jobs.resume(low.job_uuid).job.state == "stopping"
    assert bench.jobs.pause(low.job_uuid).job.reason is None
    bench.ends(low, 1, result=SAVED)
    bench.rounds(3)
    assert (bench.job(low).state, bench.job(low).reason, bench.job(high).state) == ("paused", "paused", "running")


def test_a_cancel_during_a_preemption_holds(make_bench):
    bench = make_bench(preemption=True)
    low, high = preempt(bench)
    assert bench.jobs.cancel(low.job_uuid).job.want == "cancel"
    bench.ends(low, 1)
    bench.rounds(3)
    assert (bench.job(low).state, bench.job(high).state) == ("cancelled", "running")


def test_failures_are_retried_as_often_as_asked_and_a_retry_by_hand_begins_anew(bench):
    job = bench.run(retry={"max_attempts": 3, "on": ["out_of_memory"]})
    oom = {"code": "out_of_memory", "message": "no memory", "rank": 0}
    seen = []
    for _ in range(3):
        bench.ends(bench.job(job), 1, error=oom)
        bench.rounds(3)
        now = bench.job(job)
        seen.append((now.state, now.attempt, now.retries))
    assert seen == [("running", 2, 1), ("running", 3, 2), ("failed", 3, 2)]
    assert bench.jobs.retry(job.job_uuid).job.retries == 0
    bench.rounds(2)
    bench.ends(bench.job(job), 1, error=oom)
    bench.rounds(3)
    assert (bench.job(job).state, bench.job(job).attempt, bench.job(job).retries) == ("running", 5, 1)
