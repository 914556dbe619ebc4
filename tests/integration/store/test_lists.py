"""Pages, the lists that the loops work on, and that they use their indexes."""

import pytest
from sqlalchemy import text

from posttrain_service.domain.job import NewEvent
from posttrain_service.domain.lifecycle import JobState
from posttrain_service.errors import InvalidRequest
from posttrain_service.store import events, listing

S = JobState


def ids(page):
    return [job.job_uuid for job in page.data]


def walk(store, **query):
    """All pages of a query, following `after`."""
    found, after = [], None
    while True:
        page = store.jobs.page(after=after, **query)
        found.append(ids(page))
        if not page.has_more:
            return found
        after = page.data[-1].job_uuid


def test_pages_forwards_and_backwards(store, add):
    for number in range(7):
        add(job_uuid=f"j{number}")
    assert walk(store, limit=3) == [["j6", "j5", "j4"], ["j3", "j2", "j1"], ["j0"]]
    assert walk(store, limit=1) == [[f"j{n}"] for n in range(6, -1, -1)]
    assert walk(store, limit=7) == [[f"j{n}" for n in range(6, -1, -1)]]
    page = store.jobs.page(before="j2", limit=3)
    assert (ids(page), page.has_more) == (["j5", "j4", "j3"], True)
    page = store.jobs.page(before="j5", limit=3)
    assert (ids(page), page.has_more) == (["j6"], False)
    assert store.jobs.page(after="j0").data == []


def test_a_page_does_not_shift_when_jobs_arrive_or_share_a_time(store, add):
    for number in range(4):
        add(job_uuid=f"j{number}", created_at=50.0)
    first = store.jobs.page(limit=2)
    add(job_uuid="newer", created_at=60.0)
    second = store.jobs.page(limit=2, after=first.data[-1].job_uuid)
    assert sorted(ids(first) + ids(second)) == ["j0", "j1", "j2", "j3"]


def test_filters(store, add, bring):
    add(job_uuid="a", owner="x", metadata={"team": "blue", "run": "1"})
    bring(add(job_uuid="b", owner="y", metadata={"team": "blue"}), "launching")
    bring(add(job_uuid="c", owner="x", metadata={"team": "red"}), "failed")
    bring(add(job_uuid="d", owner="x"), "cancelled")
    assert ids(store.jobs.page(owner="x")) == ["d", "c", "a"]
    assert ids(store.jobs.page(status=[S.FAILED, S.QUEUED, S.CANCELLED])) == ["d", "c", "a"]
    assert walk(store, status=[S.FAILED, S.QUEUED, S.CANCELLED], limit=1) == [["d"], ["c"], ["a"]]
    assert ids(store.jobs.page(status=[S.LAUNCHING])) == ["b"]
    assert ids(store.jobs.page(metadata={"team": "blue"})) == ["b", "a"]
    assert ids(store.jobs.page(metadata={"team": "blue", "run": "1"})) == ["a"]
    assert ids(store.jobs.page(metadata={"team": "blue", "run": "2"})) == []
    assert ids(store.jobs.page(metadata={"team": "blue"}, status=[S.QUEUED], owner="x")) == ["a"]
    assert walk(store, metadata={"team": "blue"}, limit=1) == [["b"], ["a"]]
    assert ids(store.jobs.page(metadata={"team' OR 1=1 --": "x"})) == []
    page = store.jobs.page(before="a", status=[S.FAILED, S.LAUNCHING], limit=1)
    assert (ids(page), page.has_more) == (["b"], True)


def test_cursors_that_name_nothing_are_refused(store, add):
    add(job_uuid="a")
    with pytest.raises(InvalidRequest, match="after names no job: 'zz'") as caught:
        store.jobs.page(after="zz")
    assert (caught.value.code, caught.value.param) == ("invalid_cursor", "after")
    with pytest.raises(InvalidRequest, match="before names no job"):
        store.jobs.page(before="zz")
    with pytest.raises(InvalidRequest, match="exclude each other"):
        store.jobs.page(after="a", before="a")


def test_lists_for_the_loops(store, add, bring, clock):
    now = clock.now()
    add(job_uuid="low", priority=-1, owner="x")
    add(job_uuid="first", owner="x", deadline_at=now + 50)
    add(job_uuid="second", owner="y", deadline_at=now + 1000)
    add(job_uuid="high", priority=5, owner="y")
    bring(add(job_uuid="l", owner="y"), "launching")
    bring(add(job_uuid="r", owner="y"), "launching", "running")
    bring(add(job_uuid="s", owner="x"), "launching", "stopping")
    bring(add(job_uuid="p", owner="x"), "paused")
    bring(add(job_uuid="f", owner="x"), "failed")
    assert [j.job_uuid for j in store.jobs.queued()] == ["high", "first", "second", "low"]
    assert [j.job_uuid for j in store.jobs.queued(limit=2)] == ["high", "first"]
    assert [j.job_uuid for j in store.jobs.live()] == ["l", "r", "s"]
    assert store.jobs.count_live_by_owner() == {"x": 1, "y": 2}
    counts = store.jobs.count_by_state()
    assert set(counts) == set(S)
    assert (counts[S.QUEUED], counts[S.PAUSED], counts[S.SUCCEEDED]) == (4, 1, 0)
    assert store.jobs.overdue() == []
    clock.advance(100.0)
    assert [j.job_uuid for j in store.jobs.overdue()] == ["first"]


def test_live_jobs_are_read_again_only_when_they_have_changed(store, add, bring):
    for name in ("a", "b", "ends", "queued"):
        add(job_uuid=name)
    for name in ("a", "b", "ends"):
        bring(store.jobs.get(name), "launching")
    known = {job.run_id: job for job in store.jobs.live({})}
    store.jobs.update(store.jobs.get("b").run_id, {"priority": 7}, expected={S.LAUNCHING})
    bring(store.jobs.get("ends"), "running", "failed")
    bring(store.jobs.get("queued"), "launching")
    again = store.jobs.live(known)
    assert again == store.jobs.live()
    assert [(job.job_uuid, job.priority) for job in again] == [("a", 0), ("b", 7), ("queued", 0)]
    assert again[0] is known[again[0].run_id]
    assert again[1] is not known[again[1].run_id]


def test_expired(store, add, clock):
    for name, expires_at in (("a", 20.0), ("b", 10.0), ("never", None), ("later", 1e10)):
        job = add(job_uuid=name)
        store.jobs.move(job.run_id, {S.QUEUED}, S.FAILED, changes={"expires_at": expires_at}, event=NewEvent("f", "f"))
    assert [j.job_uuid for j in store.jobs.expired()] == ["b", "a"]
    assert [j.job_uuid for j in store.jobs.expired(15.0)] == ["b"]
    assert [j.job_uuid for j in store.jobs.expired(limit=1)] == ["b"]
    store.jobs.condemn(store.jobs.get("b").run_id)
    assert [j.job_uuid for j in store.jobs.expired()] == ["a"]


def test_events_after_a_cursor(store, add):
    one, two = add(job_uuid="one"), add(job_uuid="two")
    store.events.append(one.run_id, NewEvent("a", "a", created_at=3.0), NewEvent("b", "b"))
    store.events.append(two.run_id, NewEvent("x", "x"))
    store.events.append(one.run_id, NewEvent("c", "c"))
    everything = store.events.page("one").data
    assert [event.type for event in everything] == ["queued", "a", "b", "c"]
    assert everything[1].created_at == 3.0
    page = store.events.page("one", after=everything[0].id, limit=2)
    assert ([e.type for e in page.data], page.has_more) == (["a", "b"], True)
    page = store.events.page("one", after=page.data[-1].id, limit=2)
    assert ([e.type for e in page.data], page.has_more) == (["c"], False)
    page = store.events.page("one", newest_first=True, limit=3)
    assert ([e.type for e in page.data], page.has_more) == (["c", "b", "a"], True)
    page = store.events.page("one", newest_first=True, after=page.data[-1].id)
    assert ([e.type for e in page.data], page.has_more) == (["queued"], False)
    assert not store.events.append("nobody", NewEvent("a", "a"))


def test_event_ids_are_never_used_again(store, add, bring):
    job = bring(add(), "failed")
    last = store.events.page(job.job_uuid).data[-1].id
    store.jobs.condemn(job.run_id)
    store.jobs.delete(job.run_id)
    assert store.events.page(add(job_uuid="next").job_uuid).data[0].id > last


PAGES = {
    "newest": (None, None, {}, "ix_jobs_created_at_run_id"),
    "of a state": (S.FAILED, None, {}, "ix_jobs_state_created_at_run_id"),
    "of an owner": (None, "x", {}, "ix_jobs_owner_created_at_run_id"),
    "by label": (None, None, {"team": "blue"}, "ix_job_labels_key_value_created_at_run_id"),
}


@pytest.mark.parametrize("position", [None, (50.0, "r")], ids=["first page", "next page"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_walk_an_index_and_sort_nothing(store, name, position):
    if store.database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL plans by statistics, so an empty table says nothing about its plans")
    state, owner, metadata, index = PAGES[name]
    query = listing.page_query(position, False, 20, state, owner, metadata)
    plan = explain(store, query)
    assert index in plan
    assert "TEMP B-TREE" not in plan, plan
    if position or state or owner or metadata:
        assert f"SEARCH {'label_0' if metadata else 'jobs'} USING" in plan, "it must not scan from the newest job on"


def test_other_lists_use_an_index(store):
    if store.database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL plans by statistics, so an empty table says nothing about its plans")
    plan = explain(store, events.page_query("j", 5, 10, False))
    assert "ix_events_run_id_id" in plan
    assert "TEMP B-TREE" not in plan


def explain(store, query):
    compiled = query.compile(store.database.engine, compile_kwargs={"literal_binds": True})
    with store.database.read() as connection:
        rows = connection.execute(text(f"EXPLAIN QUERY PLAN {compiled}")).all()
    return "\n".join(row[3] for row in rows)
