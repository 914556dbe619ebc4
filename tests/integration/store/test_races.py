"""Threads and processes that want the same thing at once."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from posttrain_service.domain.job import NewEvent
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.errors import Conflict
from posttrain_service.store.idempotency import IdempotencyKey

S = JobState
THREADS = 8


def together(*actions):
    """Run all actions at once, each in its thread; their results in order."""
    barrier = threading.Barrier(len(actions))

    def run(action):
        barrier.wait(20)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(run, action) for action in actions]]


def test_each_job_is_claimed_once(open_store, make_job):
    """Every thread has an engine of its own, as processes have."""
    stores = [open_store() for _ in range(THREADS)]
    jobs = [stores[0].jobs.insert(make_job(), NewEvent("queued", "q"))[0] for _ in range(25)]

    def claim_all(store, name):
        won = []
        for job in jobs:
            moved = store.jobs.move(
                job.run_id, {S.QUEUED}, S.LAUNCHING, changes={"attempt": job.attempt + 1},
                event=NewEvent("launched", name), take=[f"cpu:{job.run_id}"],
            )  # fmt: skip
            if moved is not None:
                won.append(job.run_id)
        return won

    won = together(*(lambda s=store, n=number: claim_all(s, str(n)) for number, store in enumerate(stores)))
    assert sorted(itertools.chain(*won)) == sorted(job.run_id for job in jobs)
    for job in jobs:
        assert [e.type for e in stores[0].events.page(job.job_uuid).data] == ["queued", "launched"]
        assert stores[0].jobs.get_run(job.run_id).attempt == 1
    assert len(stores[0].slots.taken()) == len(jobs)


def test_a_device_is_given_once(open_store, make_job):
    stores = [open_store() for _ in range(THREADS)]
    jobs = [stores[0].jobs.insert(make_job(), NewEvent("queued", "q"))[0] for _ in stores]

    def launch(store, job):
        changes = {"attempt": 1}
        return store.jobs.move(job.run_id, {S.QUEUED}, S.LAUNCHING, changes=changes, event=NewEvent("l", "l"), take=["gpu:0"])

    moved = together(*(lambda s=s, j=j: launch(s, j) for s, j in zip(stores, jobs, strict=True)))
    assert sum(job is not None for job in moved) == 1
    assert len(stores[0].jobs.queued()) == len(jobs) - 1


@pytest.mark.parametrize("by", ["key", "id"])
def test_the_same_request_many_times_at_once_makes_one_job(open_store, make_job, by):
    stores = [open_store() for _ in range(THREADS)]
    key = IdempotencyKey("default", "jobs.create", "k", "d" * 64, 100.0) if by == "key" else None
    jobs = [make_job(**({} if key else {"job_uuid": "mine"})) for _ in stores]

    def insert(store, job):
        return store.jobs.insert(job, NewEvent("queued", "q"), idempotency=key)

    results = together(*(lambda s=s, j=j: insert(s, j) for s, j in zip(stores, jobs, strict=True)))
    assert sum(new for _, new in results) == 1
    assert len({job.run_id for job, _ in results}) == 1
    [job] = stores[0].jobs.page().data
    assert len(stores[0].events.page(job.job_uuid).data) == 1


def test_a_file_is_not_deleted_under_a_job_that_arrives(open_store, make_job, add_file):
    stores = [open_store() for _ in range(2)]
    for _ in range(10):
        file = add_file()
        job = make_job(file_ids=[file.id])

        def insert(job=job):
            try:
                return stores[0].jobs.insert(job, NewEvent("queued", "q"))[1]
            except Exception as error:
                return error

        def delete(file=file):
            try:
                return stores[1].files.delete(file.id)
            except Conflict as error:
                return error

        inserted, deleted = together(insert, delete)
        assert (inserted is True) == isinstance(deleted, Conflict), (inserted, deleted)
        assert (inserted is True) == bool(stores[0].files.known([file.id]))


def test_one_of_many_gets_the_lease(open_store):
    stores = [open_store() for _ in range(THREADS)]
    leases = together(*(lambda s=s, n=n: s.leases.acquire("s", f"h{n}", 100.0) for n, s in enumerate(stores)))
    assert sum(lease is not None for lease in leases) == 1


def test_readers_and_writers_side_by_side_are_never_told_busy(store, make_job):
    """32 writers and 8 pollers in one process, no error of any kind, and nobody waits for long."""
    done = threading.Event()

    def write():
        for _ in range(2):
            job, _ = store.jobs.insert(make_job(), NewEvent("queued", "q"))
            store.events.append(job.run_id, NewEvent("note", "n"))
            assert store.jobs.move(job.run_id, {S.QUEUED}, S.CANCELLED, event=NewEvent("cancelled", "c"))

    def poll():
        while not done.is_set():
            page = store.jobs.page(limit=5)
            for job in page.data[:2]:
                store.events.page(job.job_uuid)
            store.jobs.queued()
            done.wait(0.2)  # as a client that polls five times a second

    with ThreadPoolExecutor(40) as pool:
        pollers = [pool.submit(poll) for _ in range(8)]
        writers = [pool.submit(write) for _ in range(32)]
        try:
            for writer in writers:
                writer.result(60)
        finally:
            done.set()
        for poller in pollers:
            poller.result(60)
    assert store.jobs.count_by_state()[S.CANCELLED] == 64
