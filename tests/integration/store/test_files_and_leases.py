"""Rows of uploads, and leases with their fencing tokens."""

import pytest

from posttrain_service.domain.job import NewEvent
from posttrain_service.errors import Conflict, InvalidRequest, NotFound
from posttrain_service.store.idempotency import IdempotencyKey

EVENT = NewEvent("queued", "queued")


def test_files_are_stored_listed_and_deleted(store, add_file):
    one = add_file(filename="ä b.jsonl", report={"rows": 3, "errors": []})
    two = add_file(owner="x", size_bytes=2**40)
    three = add_file(purpose="fine-tune-results")
    assert store.files.get(one.id) == one
    assert store.files.get("file-x") is None
    assert store.files.page().data == [three, two, one]
    assert store.files.page(newest_first=False).data == [one, two, three]
    assert store.files.page(purpose="fine-tune").data == [two, one]
    assert store.files.page(owner="x").data == [two]
    page = store.files.page(limit=1, after=three.id)
    assert (page.data, page.has_more) == ([two], True)
    page = store.files.page(limit=1, after=two.id, newest_first=False)
    assert (page.data, page.has_more) == ([three], False)
    with pytest.raises(InvalidRequest, match="names no file"):
        store.files.page(after="file-x")
    assert store.files.delete(one.id) == one
    with pytest.raises(NotFound):
        store.files.delete(one.id)
    assert store.files.known([one.id, two.id, "x"]) == {two.id}


def test_a_file_that_a_job_needs_stays(store, add_file, make_job, bring):
    file = add_file()
    job, _ = store.jobs.insert(make_job(job_uuid="user", file_ids=[file.id, file.id]), EVENT)
    with pytest.raises(Conflict, match="used by job user") as caught:
        store.files.delete(file.id)
    assert caught.value.code == "file_in_use"
    bring(job, "failed")
    assert store.files.delete(file.id) == file


def test_expired_files_are_gone_but_not_under_a_job(store, add_file, make_job, bring, clock):
    early, late = add_file(expires_at=clock.now() + 100), add_file(expires_at=clock.now() + 50)
    stays = add_file()
    job, _ = store.jobs.insert(make_job(file_ids=[early.id]), EVENT)
    assert store.files.expired() == []
    clock.advance(200.0)
    assert store.files.get(late.id) is None
    assert store.files.page().data == [stays]
    assert store.files.expired() == [late]
    bring(job, "cancelled")
    assert store.files.expired() == [late, early]
    assert store.files.known([early.id]) == {early.id}
    assert store.files.delete(early.id) == early


def test_the_same_upload_twice_is_one_file(store, add_file, clock):
    key = IdempotencyKey("default", "files.create", "k", "d" * 64, 100.0)
    first, second = add_file(), add_file()
    store.files.delete(first.id)
    store.files.delete(second.id)
    assert store.files.insert(first, idempotency=key) == (first, True)
    assert store.files.insert(second, idempotency=key) == (first, False)
    assert store.files.page().data == [first]
    store.files.delete(first.id)
    with pytest.raises(Conflict, match="has been deleted"):
        store.files.insert(second, idempotency=key)


def test_leases_have_one_holder_and_a_rising_token(store, clock):
    first = store.leases.acquire("s", "a", 10.0)
    assert (first.holder, first.token) == ("a", 1)
    assert store.leases.acquire("s", "b", 10.0) is None
    assert store.leases.acquire("other", "b", 10.0).token == 1
    clock.advance(9.0)
    renewed = store.leases.acquire("s", "a", 10.0)
    assert (renewed.token, renewed.expires_at) == (1, clock.now() + 10)
    assert store.leases.holder("s") == renewed
    clock.advance(10.0)
    assert store.leases.holder("s") is None
    assert store.leases.acquire("s", "b", 10.0).token == 2
    assert not store.leases.release(first)
    assert store.leases.acquire("s", "a", 10.0) is None
    assert store.leases.release(store.leases.holder("s"))
    assert store.leases.acquire("s", "a", 10.0).token == 3


def test_its_own_lease_is_new_after_a_gap(store, clock):
    """Whoever let it run out can't know what happened in between."""
    assert store.leases.acquire("s", "a", 10.0).token == 1
    clock.advance(11.0)
    assert store.leases.acquire("s", "a", 10.0).token == 2
