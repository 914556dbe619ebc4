"""From a launch to an end: what the supervisor does with what it sees."""

import json
import os

from posttrain_service.launch.backend import Liveness
from posttrain_service.work.supervisor import UNKILLABLE_PAUSE_S
from posttrain_trainer.contract.rundir import write_json

DONE = {"status": "completed", "steps": 4, "total_steps": 4, "checkpoint": "step-000004"}


def write_events(bench, job, *messages, attempt=1):
    paths = bench.run_dir(job).attempt(attempt)
    paths.path.mkdir(parents=True, exist_ok=True)
    with paths.events.open("a") as file:
        for message in messages:
            record = {"time": 1.5, "attempt": attempt, "type": "phase", "message": message, "data": {"a": 1}}
            file.write(json.dumps(record) + "\n")


def phases(bench, job):
    return [event.message for event in bench.jobs.events(job.job_uuid, limit=1000).data if event.type == "phase"]


def test_a_completed_run_succeeds_and_frees_its_devices_after_a_sweep(bench):
    job = bench.run()
    bench.ends(job, result=DONE, heartbeat={"step": 4, "total_steps": 4})
    bench.rounds()
    done = bench.job(job)
    assert (done.state, done.reason, done.progress["step"]) == ("succeeded", "completed", 4)
    assert bench.backend.named("sweep") == [("sweep", job.run_id, 1)]
    assert bench.taken() == []


def test_devices_stay_taken_while_something_does_not_die(bench):
    job = bench.run()
    waiting = bench.submit()
    bench.backend.unkillable = True
    bench.ends(job, result=DONE)
    bench.rounds(2)
    assert bench.job(job).state == "running"
    assert (bench.taken(), bench.job(waiting).state) == (["cpu:0"], "queued")
    assert len(bench.backend.named("sweep")) == 1  # it takes long, so not in every round
    bench.backend.unkillable = False
    bench.clock.advance(UNKILLABLE_PAUSE_S)
    bench.rounds(2)
    assert (bench.job(job).state, bench.job(waiting).state) == ("succeeded", "running")


def test_one_jobs_trouble_does_not_keep_the_others_from_being_looked_after(make_bench, monkeypatch):
    bench = make_bench(slots=("cpu:0", "cpu:1"))
    bad, good = bench.run(), bench.run()
    look = bench.backend.look

    def broken(run_dir, attempt):
        if run_dir.path.name == bad.run_id:
            raise TypeError("a defect")
        return look(run_dir, attempt)

    monkeypatch.setattr(bench.backend, "look", broken)
    bench.ends(good, result=DONE)
    bench.rounds()
    assert bench.job(good).state == "succeeded"


def test_a_failed_run_tells_its_own_error_with_the_log_of_its_rank(bench):
    job = bench.run()
    paths = bench.run_dir(job).attempt(1)
    paths.logs.mkdir(parents=True)
    paths.rank_log(1).write_text("10%\r20%\rloss is nan\n")
    bench.ends(job, 1, error={"code": "non_finite_loss", "message": "loss is nan", "rank": 1})
    bench.rounds()
    failed = bench.job(job)
    assert (failed.state, failed.reason) == ("failed", "non_finite_loss")
    assert (failed.error["rank"], failed.error["log_tail"]) == (1, "loss is nan")
    assert bench.taken() == []


def test_a_run_that_vanished_is_lost_and_never_running_for_ever(bench):
    job = bench.run()
    bench.sees(job, liveness=Liveness.DEAD, exit=None)
    bench.rounds()
    assert (bench.job(job).state, bench.job(job).reason) == ("failed", "lost")


def test_orphans_are_swept_before_the_job_ends(bench):
    job = bench.run()
    bench.sees(job, liveness=Liveness.DEAD, orphans=True)
    bench.rounds()
    assert bench.job(job).state == "running"
    assert bench.backend.named("sweep") == [("sweep", job.run_id, 1)]
    bench.sees(job, orphans=False)
    bench.rounds()
    assert bench.job(job).reason == "lost"


def test_cancel_is_told_to_the_run_and_holds_when_it_is_gone(bench):
    job = bench.run()
    assert bench.jobs.cancel(job.job_uuid).job.state == "stopping"
    bench.rounds()
    assert bench.backend.named("stop") == [("stop", job.run_id, 1, "cancel")]
    assert bench.job(job).state == "stopping"
    bench.ends(job, 1)
    bench.rounds()
    assert bench.job(job).state == "cancelled"
    assert bench.taken() == []


def test_a_pause_becomes_a_cancel(bench):
    job = bench.run()
    bench.jobs.pause(job.job_uuid)
    bench.rounds()
    bench.jobs.cancel(job.job_uuid)
    bench.rounds()
    assert [call[-1] for call in bench.backend.named("stop")] == ["pause", "cancel"]
    bench.ends(job, 1, result={"status": "stopped", "want": "pause"})
    bench.rounds()
    assert bench.job(job).state == "cancelled"


def test_a_run_that_outlasts_its_grace_is_killed(bench):
    job = bench.run()
    bench.jobs.cancel(job.job_uuid)
    bench.rounds()
    assert bench.backend.named("sweep") == []
    bench.clock.advance(bench.runtime.settings.stop_grace_s + 10)
    bench.rounds()
    assert bench.backend.named("sweep")


def test_a_silent_run_is_stopped_and_fails_for_that_reason(bench):
    job = bench.run()
    bench.sees(job, heartbeat={"phase": "train", "time": bench.clock.now(), "step": 3})
    bench.clock.advance(bench.runtime.settings.heartbeat_train_s + 1)
    bench.rounds()
    assert bench.job(job).state == "stopping"
    bench.ends(job, -9)
    bench.rounds()
    assert (bench.job(job).state, bench.job(job).reason) == ("failed", "heartbeat_timeout")


def test_the_queue_and_pause_have_an_end(bench):
    running, waiting, paused = bench.run(), bench.submit(), bench.submit()
    bench.jobs.pause(paused.job_uuid)
    bench.sees(running, heartbeat={"phase": "train", "time": bench.clock.now() + 1e8})
    bench.clock.advance(bench.runtime.settings.queue_ttl_s)
    bench.rounds()
    assert (bench.job(waiting).state, bench.job(waiting).reason) == ("failed", "queue_timeout")
    bench.clock.advance(bench.runtime.settings.paused_ttl_s)
    bench.rounds()
    assert (bench.job(paused).state, bench.job(paused).reason) == ("cancelled", "paused_expired")


def test_the_next_look_is_soon_only_where_each_may_end_a_wait(bench):
    supervisor = bench.runtime.loops[0]
    bench.submit()
    bench.runtime.loops[1].round()
    assert supervisor.round() < 0.1  # launching
    assert supervisor.round() == supervisor.interval_s  # running


def test_events_of_the_trainer_are_taken_in_once_over_restarts(make_bench):
    first = make_bench()
    job = first.run()
    write_events(first, job, "one", "two")
    first.rounds()
    first.runtime.stop()
    second = make_bench(backend=first.backend)
    write_events(second, job, "three")
    second.rounds(2)
    assert phases(second, job) == ["one", "two", "three"]
    times = {e.created_at for e in second.jobs.events(job.job_uuid).data if e.type == "phase"}
    assert times == {1.5}


def test_a_torn_line_is_waited_for_and_a_foreign_one_left_out(bench):
    job = bench.run()
    write_events(bench, job, "one")
    path = bench.run_dir(job).attempt(1).events
    line = path.read_bytes()
    path.write_bytes(line + b"not json\n" + line[:20])
    bench.rounds()
    assert phases(bench, job) == ["one"]
    path.write_bytes(line + b"not json\n" + line)
    bench.rounds()
    assert phases(bench, job) == ["one", "one"]


def test_last_events_are_taken_in_before_the_end(bench):
    job = bench.run()
    write_events(bench, job, "late")
    bench.ends(job, result=DONE)
    bench.rounds()
    assert bench.event_types(job)[-2:] == ["phase", "succeeded"]


def test_many_events_and_long_lines_are_taken_in_pieces(bench):
    job = bench.run()
    write_events(bench, job, *(f"m{number}" for number in range(450)), "x" * 300_000, "last")
    bench.rounds()
    found = []
    after = None
    while True:
        page = bench.jobs.events(job.job_uuid, after=after, limit=100)
        found += [event.message for event in page.data if event.type == "phase"]
        if not page.has_more:
            break
        after = page.last_id
    assert found == [f"m{number}" for number in range(450)] + ["last"]


def test_progress_of_a_live_job_is_read_from_its_folder(bench):
    job = bench.run()
    paths = bench.run_dir(job).attempt(1)
    paths.path.mkdir(parents=True, exist_ok=True)
    write_json(paths.heartbeat, {"step": 1, "total_steps": 4, "phase": "train"})
    view = bench.jobs.get(job.job_uuid)
    assert (view.progress["percent"], view.resources["devices"]) == (25.0, ["cpu:0"])


def test_a_pause_has_the_time_that_its_save_takes(bench):
    job = bench.run(training={}, torchrun={"shutdown_timeout_s": 7})
    paths = bench.run_dir(job).attempt(1)
    paths.path.mkdir(parents=True)
    record = {"time": 1.5, "attempt": 1, "type": "checkpoint", "message": "saved", "data": {"seconds": 100.0}}
    paths.events.write_text(json.dumps(record) + "\n")
    bench.rounds()
    stopping = bench.jobs.pause(job.job_uuid).job
    assert stopping.deadline_at == bench.clock.now() + 300 + 10
    cancelled = bench.jobs.cancel(job.job_uuid).job
    assert cancelled.deadline_at == bench.clock.now() + 7 + 10


def test_a_job_that_has_run_its_time_is_stopped_so_that_it_saves(bench):
    job = bench.run(resources={"max_duration_s": 60})
    bench.sees(job, heartbeat={"phase": "train", "time": bench.clock.now()})
    bench.clock.advance(60)
    bench.rounds()
    assert bench.backend.named("stop") == [("stop", job.run_id, 1, "pause")]
    bench.ends(job, 1, result={"status": "stopped", "want": "pause", "checkpoint": "step-000003"})
    bench.rounds()
    assert (bench.job(job).state, bench.job(job).reason) == ("failed", "max_duration")


def test_server_paths_are_taken_out_of_what_the_trainer_says(bench):
    job = bench.run()
    folder, models = bench.run_dir(job).path, bench.runtime.settings.base_models_dir
    write_events(bench, job, f"loading {models}/tiny", f"reading {folder}/data/train.jsonl")
    bench.ends(job, 1, error={"code": "model_not_found", "message": f"{models}/tiny is broken", "rank": 0, "details": {"at": f"{folder}/x"}})
    bench.rounds()
    assert phases(bench, job) == ["loading models/tiny", "reading data/train.jsonl"]
    failed = bench.job(job)
    assert failed.error["message"] == "models/tiny is broken"
    assert str(bench.runtime.settings.storage_dir) not in json.dumps([e.message for e in bench.jobs.events(job.job_uuid).data])


def test_an_unreadable_events_file_does_not_keep_a_job_from_ending(bench):
    job = bench.run()
    paths = bench.run_dir(job).attempt(1)
    paths.path.mkdir(parents=True)
    os.mkfifo(paths.events)
    bench.ends(job, result=DONE)
    bench.rounds()
    assert bench.job(job).state == "succeeded"


def test_a_clock_that_is_set_ends_nothing(make_bench):
    bench = make_bench(heartbeat_train_s=60, slots=("cpu:0", "cpu:1"))
    running, timed = bench.run(), bench.run(resources={"max_duration_s": 600})
    for job in (running, timed):
        bench.sees(job, heartbeat={"phase": "train", "time": bench.clock.now()}, silence_s=1.0)
    queued = bench.submit()
    deadline = bench.job(timed).deadline_at
    for seconds in (3 * 86400.0, -5 * 86400.0):
        bench.clock.jump(seconds)
        bench.rounds(2)
        deadline += seconds
        assert [bench.job(job).state for job in (running, timed, queued)] == ["running", "running", "queued"]
        assert abs(bench.job(timed).deadline_at - deadline) < 0.001
    bench.clock.advance(601)
    bench.rounds()
    assert [bench.job(job).state for job in (running, timed)] == ["running", "stopping"]
    bench.sees(running, silence_s=61.0)
    bench.rounds()
    assert bench.job(running).reason == "heartbeat_timeout"


def test_the_end_of_a_stop_tells_how_long_it_took(bench):
    job = bench.run()
    bench.jobs.cancel(job.job_uuid)
    bench.clock.advance(1.25)
    bench.ends(job, 1)
    bench.rounds()
    end = [event for event in bench.jobs.events(job.job_uuid).data if event.type == "cancelled"]
    assert [event.data["stop_took_s"] for event in end] == [1.25]
