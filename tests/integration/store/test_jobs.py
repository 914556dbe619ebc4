"""Rows of jobs: stored once, moved once, deleted in two steps."""

from dataclasses import replace

import pytest

from posttrain_service.domain.job import NewEvent, RetryPolicy
from posttrain_service.domain.lifecycle import EndReason, JobState
from posttrain_service.errors import Conflict, InvalidRequest
from posttrain_service.store.idempotency import IdempotencyKey
from posttrain_service.store.leases import Lease

S = JobState
EVENT = NewEvent("moved", "moved")


def types(store, job):
    return [event.type for event in store.events.page(job.job_uuid).data]


def test_everything_of_a_job_survives_a_restart(open_store, make_job, clock):
    job = make_job(
        job_uuid="my job/1", name="näme", owner="o", spec={"a": [1, 2.5, None, {"b": "ü"}]}, warnings=["w"], priority=-3,
        metadata={"team": "blue", 'k"ey': "va'lue"}, max_duration_s=5.5, queue_ttl_s=6.5, ttl_s=7.5, keep=True,
        retry=RetryPolicy(3, ("lost",)), devices_wanted=("gpu:0", "gpu:1"), deadline_at=9.5,
    )  # fmt: skip
    first = open_store()
    stored, new = first.jobs.insert(job, NewEvent("queued", "in the queue", data={"rows": 3}))
    first.close()
    assert new
    assert stored == replace(job, moved_at=clock.now())
    again = open_store()
    assert again.jobs.get("my job/1") == again.jobs.get_run(job.run_id) == stored
    [event] = again.events.page("my job/1").data
    assert (event.job_uuid, event.type, event.message, event.data) == ("my job/1", "queued", "in the queue", {"rows": 3})
    assert event.created_at == clock.now()
    assert again.jobs.get("nobody") is None
    assert again.jobs.get_run("nobody") is None


def test_the_same_id_and_body_is_the_same_job(store, make_job):
    job = make_job(job_uuid="mine")
    stored, new = store.jobs.insert(job, EVENT)
    assert new
    again, new = store.jobs.insert(make_job(job_uuid="mine"), EVENT)
    assert not new
    assert again == stored
    assert types(store, job) == ["moved"]
    for other in (make_job(job_uuid="mine", body_digest="e" * 64), make_job(job_uuid="mine", owner="somebody")):
        with pytest.raises(Conflict, match="mine is taken") as caught:
            store.jobs.insert(other, EVENT)
        assert caught.value.code == "job_exists"
    assert len(store.jobs.page().data) == 1


def key(**fields):
    base = {"owner": "default", "scope": "jobs.create", "key": "k", "body_digest": "d" * 64, "ttl_s": 100.0}
    return IdempotencyKey(**base | fields)


def test_idempotency_keys(open_store, make_job, clock):
    store = open_store()
    job, new = store.jobs.insert(make_job(), EVENT, idempotency=key())
    assert new
    assert store.idempotency.find(key()) == job.run_id
    store.close()
    store = open_store()
    assert store.jobs.insert(make_job(), EVENT, idempotency=key()) == (job, False)
    with pytest.raises(InvalidRequest, match="another request body") as caught:
        store.jobs.insert(make_job(), EVENT, idempotency=key(body_digest="e" * 64))
    assert caught.value.code == "idempotency_key_reused"
    for other in (key(owner="x"), key(scope="files.create"), key(key="l")):
        assert store.idempotency.find(other) is None
        assert store.jobs.insert(make_job(), EVENT, idempotency=other)[1]
    assert store.idempotency.forget_expired() == 0
    clock.advance(100.0)
    second, new = store.jobs.insert(make_job(), EVENT, idempotency=key(body_digest="e" * 64))
    assert new
    assert second.run_id != job.run_id
    assert store.idempotency.forget_expired() == 3
    assert store.idempotency.find(key(body_digest="e" * 64)) == second.run_id


def test_a_key_whose_job_was_deleted_makes_no_second_one(store, make_job, bring):
    job, _ = store.jobs.insert(make_job(), EVENT, idempotency=key())
    bring(job, "cancelled")
    assert store.jobs.condemn(job.run_id)
    for _ in range(2):
        with pytest.raises(Conflict, match="has been deleted") as caught:
            store.jobs.insert(make_job(), EVENT, idempotency=key())
        assert caught.value.code == "job_deleted"
        store.jobs.delete(job.run_id)


def test_a_move_changes_row_and_event_together(store, add, clock):
    job = add()
    at = clock.advance(5.0)
    moved = store.jobs.move(
        job.run_id, {S.QUEUED}, S.LAUNCHING, changes={"attempt": 1, "launched_at": at, "deadline_at": at + 60},
        event=[NewEvent("launched", "l"), NewEvent("note", "n", "warn", {"x": 1})],
    )  # fmt: skip
    assert moved == replace(
        job, state=S.LAUNCHING, attempt=1, launched_at=at, deadline_at=at + 60, moved_at=at, version=2
    )
    assert store.jobs.get_run(job.run_id) == moved
    assert types(store, job) == ["queued", "launched", "note"]


def test_a_guarded_move_returns_none_when_somebody_else_was_first(store, add, bring):
    job = bring(add(), "launching")
    running = bring(job, "running")
    for guards in (
        {"expected": {S.QUEUED, S.LAUNCHING}, "to": S.FAILED},
        {"expected": {S.RUNNING}, "to": S.FAILED, "expected_attempt": 7},
        {"expected": {S.RUNNING}, "to": S.FAILED, "expected_version": job.version},
    ):
        before = types(store, job)
        assert store.jobs.move(job.run_id, event=EVENT, **guards) is None
        assert types(store, job) == before
        assert store.jobs.get_run(job.run_id) == running
    assert store.jobs.move("nobody", {S.RUNNING}, S.FAILED, event=EVENT) is None
    assert store.jobs.move(
        job.run_id, {S.RUNNING}, S.FAILED, event=EVENT, expected_attempt=1, expected_version=running.version
    )


def test_moves_that_the_table_lacks_are_refused(store, add, bring):
    job = bring(add(), "launching", "succeeded")
    for target in S:
        with pytest.raises(Conflict):
            store.jobs.move(job.run_id, {job.state}, target, event=EVENT)
    with pytest.raises(Conflict):
        store.jobs.move(job.run_id, {S.RUNNING}, S.QUEUED, via=S.SUCCEEDED, event=EVENT)
    with pytest.raises(ValueError, match="job_uuid"):
        store.jobs.move(job.run_id, {S.QUEUED}, S.LAUNCHING, changes={"job_uuid": "x"}, event=EVENT)
    assert store.jobs.get_run(job.run_id) == job


def test_ends_and_retries(store, add, bring, clock):
    job = bring(add(), "launching", "running")
    clock.advance(3.0)
    error = {"code": "lost", "message": "gone", "rank": None, "log_tail": None}
    failed = store.jobs.move(
        job.run_id, {S.RUNNING}, S.FAILED, event=EVENT,
        changes={"reason": EndReason.LOST, "error": error, "expires_at": 5e9, "progress": {"step": 4, "loss": float("nan")}},
    )  # fmt: skip
    assert (failed.ended_at, failed.reason, failed.error, failed.expires_at) == (clock.now(), EndReason.LOST, error, 5e9)
    assert failed.progress == {"step": 4, "loss": None}
    again = store.jobs.move(job.run_id, {S.FAILED}, S.QUEUED, changes={"deadline_at": 6e9}, event=EVENT)
    assert (again.reason, again.error, again.ended_at, again.expires_at, again.want) == (None,) * 5
    assert (again.deadline_at, again.attempt, again.progress) == (6e9, 1, failed.progress)


def test_a_retry_by_policy_is_one_step_with_two_events(store, add, bring):
    job = bring(add(), "launching", "running")
    events = [NewEvent("failed", "f", "error"), NewEvent("queued", "q")]
    moved = store.jobs.move(job.run_id, {S.RUNNING}, S.QUEUED, via=S.FAILED, event=events)
    assert (moved.state, moved.ended_at) == (S.QUEUED, None)
    assert types(store, job)[-2:] == ["failed", "queued"]


def test_slots_are_taken_and_freed_with_the_move(store, add, bring, clock):
    def launch(job, *devices):
        changes = {"attempt": job.attempt + 1, "devices": list(devices)}
        return store.jobs.move(job.run_id, {S.QUEUED}, S.LAUNCHING, changes=changes, event=EVENT, take=devices)

    def taken():
        return {lease.device: (lease.run_id, lease.attempt) for lease in store.slots.taken()}

    one, two = add(), add()
    assert launch(one, "cpu:0", "cpu:1").devices == ["cpu:0", "cpu:1"]
    assert launch(two, "cpu:2", "cpu:1") is None
    assert store.jobs.get_run(two.run_id) == two, "nothing of the failed claim may stay"
    assert types(store, two) == ["queued"]
    assert taken() == {"cpu:0": (one.run_id, 1), "cpu:1": (one.run_id, 1)}
    one = bring(store.jobs.get_run(one.run_id), "running", "stopping")
    assert set(taken()) == {"cpu:0", "cpu:1"}
    one = bring(one, "paused")
    assert taken() == {}
    assert one.devices == ["cpu:0", "cpu:1"], "what it held last stays visible"
    assert launch(two, "cpu:1")
    failed = [NewEvent("failed", "f"), NewEvent("queued", "q")]
    store.jobs.move(two.run_id, {S.LAUNCHING}, S.QUEUED, via=S.FAILED, event=failed)
    assert taken() == {}


def test_a_broken_fence_moves_nothing(store, add, clock):
    job = add()
    old = store.leases.acquire("scheduler", "a", 10.0)
    clock.advance(11.0)
    new = store.leases.acquire("scheduler", "b", 10.0)
    assert store.jobs.move(job.run_id, {S.QUEUED}, S.FAILED, event=EVENT, fence=old) is None
    assert store.jobs.move(job.run_id, {S.QUEUED}, S.FAILED, event=EVENT, fence=Lease("none", "a", 1, 9e9)) is None
    assert store.jobs.update(job.run_id, {"priority": 3}, expected={S.QUEUED}, fence=old) is None
    assert store.jobs.get_run(job.run_id) == job
    assert store.jobs.move(job.run_id, {S.QUEUED}, S.FAILED, event=EVENT, fence=new).state is S.FAILED


def test_update_stays_in_the_state(store, add, bring):
    job = bring(add(), "launching", "running", "stopping")
    changed = store.jobs.update(job.run_id, {"want": "cancel"}, expected={S.STOPPING}, event=EVENT)
    assert changed == replace(job, want="cancel", version=job.version + 1)
    assert types(store, job)[-1] == "moved"
    assert store.jobs.update(job.run_id, {"want": "pause"}, expected={S.RUNNING}) is None
    assert store.jobs.update(job.run_id, {"want": "pause"}, expected={S.STOPPING}, expected_attempt=9) is None
    assert store.jobs.get_run(job.run_id) == changed


def test_deleting_is_marked_first_and_finished_later(store, add, bring, make_job, clock):
    live, ended = add(), bring(add(job_uuid="e", metadata={"a": "b"}), "failed")
    assert not store.jobs.condemn(live.run_id)
    assert not store.jobs.delete(ended.run_id), "its artifacts come first"
    marked_at = clock.now()
    assert store.jobs.condemn(ended.run_id)
    clock.advance(1.0)
    assert store.jobs.condemn(ended.run_id), "a repeat is harmless"
    assert marked_at < clock.now()
    assert store.jobs.get("e") is None
    assert store.jobs.get_run(ended.run_id) is None
    assert store.jobs.exists(ended.run_id)
    assert [job.run_id for job in store.jobs.page().data] == [live.run_id]
    assert store.jobs.page(metadata={"a": "b"}).data == []
    assert store.jobs.move(ended.run_id, {S.FAILED}, S.QUEUED, event=EVENT) is None
    with pytest.raises(Conflict, match="being deleted"):
        store.jobs.insert(make_job(job_uuid="e"), EVENT)
    [left] = store.jobs.condemned()
    assert left.run_id == ended.run_id
    assert store.jobs.delete(left.run_id)
    assert not store.jobs.delete(left.run_id)
    assert not store.jobs.exists(left.run_id)
    assert store.jobs.condemned() == []
    assert store.events.page("e").data == []
    assert store.jobs.insert(make_job(job_uuid="e"), EVENT)[1], "the id is free again"


def test_text_that_a_database_refuses_is_cleaned(store, add, bring):
    job = bring(add(metadata={"k": "a\x00b"}), "launching", "running")
    error = {"message": "x\x00y \ud800z", "log_tail": "\udcff ok ü"}
    moved = store.jobs.move(
        job.run_id, {S.RUNNING}, S.FAILED, changes={"error": error},
        event=NewEvent("failed", "m\x00", data={"n\x00": float("inf")}),
    )  # fmt: skip
    assert moved.error == {"message": "x\ufffdy \ufffdz", "log_tail": "\ufffd ok ü"}
    event = store.events.page(job.job_uuid).data[-1]
    assert (event.message, event.data) == ("m\ufffd", {"n\ufffd": None})
    assert moved.metadata == {"k": "a\ufffdb"}


def test_an_insert_without_its_file_stores_nothing(store, make_job, add_file):
    file = add_file()
    with pytest.raises(InvalidRequest, match="file-x does not exist"):
        store.jobs.insert(make_job(file_ids=[file.id, "file-x"]), EVENT, idempotency=key())
    assert store.jobs.page().data == []
    assert store.idempotency.find(key()) is None
