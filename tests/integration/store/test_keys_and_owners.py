"""Rows of API keys, and the store as one owner sees it, on both databases."""

import pytest

from posttrain_service.domain.keys import make_key
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.errors import InvalidRequest


def test_keys_are_kept_and_refused_by_every_server_at_once(open_store, clock):
    here, there = open_store(), open_store()
    assert not here.keys.any()
    assert here.keys.all() == []
    assert here.keys.get("0" * 16) is None
    assert here.keys.revoke("0" * 16) is None
    key, _ = make_key("ann", "submit", clock.now(), label="läptop")
    other, _ = make_key("bob", "admin", clock.advance(1.0))
    for one in (key, other):
        here.keys.insert(one)
    assert there.keys.all() == [key, other]
    assert there.keys.get(key.id) == key
    clock.advance(5.0)
    revoked = there.keys.revoke(key.id)
    assert revoked.revoked_at == clock.now()
    clock.advance(5.0)
    assert here.keys.revoke(key.id) == here.keys.get(key.id) == revoked
    assert here.keys.get(other.id).revoked_at is None
    assert here.keys.any()


def test_a_view_has_one_owners_jobs_and_files(store, add, add_file):
    anns = [add(owner="ann", metadata={"n": "1"}), add(owner="ann")]
    bobs = add(owner="bob", metadata={"n": "1"})
    file, foreign = add_file(owner="ann"), add_file(owner="bob")
    ann = store.seen_by("ann")
    assert store.seen_by(None) is store
    assert ann.jobs.page().data == anns[::-1]
    assert ann.jobs.page(owner="bob").data == []
    assert ann.jobs.page(metadata={"n": "1"}, status=[JobState.QUEUED]).data == anns[:1]
    assert (ann.jobs.get(bobs.job_uuid), ann.jobs.get_run(bobs.run_id)) == (None, None)
    assert (ann.jobs.get(anns[0].job_uuid), ann.jobs.get_run(anns[0].run_id)) == (anns[0], anns[0])
    assert (ann.jobs.count_by_state()[JobState.QUEUED], store.jobs.count_by_state()[JobState.QUEUED]) == (2, 3)
    assert len(ann.jobs.queued()) == 3  # the place in the queue is among everybody's
    assert ann.files.page().data == [file]
    assert (ann.files.get(file.id), ann.files.get(foreign.id)) == (file, None)
    for page, cursor in ((ann.jobs.page, bobs.job_uuid), (ann.files.page, foreign.id)):
        with pytest.raises(InvalidRequest, match="names no"):
            page(after=cursor)
    assert len(store.jobs.page().data) == 3
