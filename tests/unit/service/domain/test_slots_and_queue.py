"""Which devices a job gets, and who goes first."""

import pytest

from posttrain_service.domain.queueing import choose, order, positions
from posttrain_service.domain.slots import check_fits, fit, resolve
from posttrain_service.errors import InvalidRequest

CPUS = ("cpu:0", "cpu:1")
GPUS = ("gpu:0", "gpu:1", "gpu:2", "gpu:3")


@pytest.mark.parametrize(
    ("wanted", "pool", "taken", "slots"),
    [
        (1, CPUS, [], ("cpu:0",)),
        (1, CPUS, ["cpu:0"], ("cpu:1",)),
        (2, CPUS, ["cpu:0"], None),
        (2, GPUS, ["gpu:1"], ("gpu:0", "gpu:2")),
        ("auto", CPUS, [], ("cpu:0",)),
        ("auto", CPUS, CPUS, None),
        ("auto", GPUS, ["gpu:0"], ("gpu:1", "gpu:2", "gpu:3")),
        (("gpu:3", "gpu:1"), GPUS, [], ("gpu:3", "gpu:1")),
        (("3", "1"), GPUS, [], ("gpu:3", "gpu:1")),
        (("gpu:3",), GPUS, ["gpu:3"], None),
    ],
)
def test_fit(wanted, pool, taken, slots):
    assert fit(wanted, pool, taken) == slots


@pytest.mark.parametrize(
    ("wanted", "pool", "code", "text"),
    [
        (3, CPUS, "too_many_devices", "this host has 2 .*POSTTRAIN_CPU_SLOTS"),
        (5, GPUS, "too_many_devices", "this host has 4 "),
        (("gpu:9",), GPUS, "unknown_device", "no device gpu:9"),
        (("0", "gpu:0"), GPUS, "duplicate_device", "named twice"),
        ("auto", (), "no_devices", "no devices"),
    ],
)
def test_what_a_host_can_never_give_is_refused(wanted, pool, code, text):
    with pytest.raises(InvalidRequest, match=text) as caught:
        check_fits(wanted, pool)
    assert caught.value.code == code
    assert caught.value.param == "resources.devices"


@pytest.mark.parametrize("wanted", [1, 4, "auto", ("gpu:0", "3")])
def test_what_it_can_give_is_not(wanted):
    check_fits(wanted, GPUS)


def test_numbers_name_slots():
    assert resolve(["1", "gpu:0"], GPUS) == ("gpu:1", "gpu:0")


@pytest.fixture
def queue(make_job):
    def make(*rows):
        """Each row: name, owner, priority, time of queueing, devices."""
        return [
            make_job("queued", run_id=name, owner=owner, priority=priority, moved_at=at, devices_wanted=devices)
            for name, owner, priority, at, devices in rows
        ]

    return make


def names(jobs):
    return "".join(job.run_id for job in jobs)


def test_priority_then_fair_share_then_age(queue):
    jobs = queue(("a", "x", 0, 1.0, 1), ("b", "x", 0, 2.0, 1), ("c", "y", 0, 3.0, 1), ("d", "x", 5, 9.0, 1))
    assert names(order(jobs, {})) == "dcab"  # d counts for x, so y is next
    assert names(order(jobs, {"y": 3})) == "dabc"
    assert names(order(jobs[:3], {})) == "acb"
    assert names(order([], {})) == ""
    assert positions(jobs, {}) == {"d": 1, "c": 2, "a": 3, "b": 4}


def test_age_decides_for_a_single_owner_whatever_the_order_given(queue):
    jobs = queue(*((n, "x", 0, at, 1) for n, at in zip("cab", (3.0, 1.0, 2.0), strict=True)))
    assert names(order(jobs, {})) == names(order(jobs[::-1], {})) == "abc"


def test_choose_fills_the_pool_in_order(queue):
    jobs = queue(("a", "x", 0, 1.0, 2), ("b", "x", 0, 2.0, 1), ("c", "x", 0, 3.0, 2))
    assert [(j.run_id, d) for j, d in choose(jobs, {}, GPUS, [], 10.0).launches] == [
        ("a", ("gpu:0", "gpu:1")),
        ("b", ("gpu:2",)),
    ]
    assert choose(jobs, {}, GPUS, GPUS, 10.0).launches == []


def test_back_fill_does_not_starve_the_job_it_overtakes(queue):
    jobs = queue(("a", "x", 0, 1.0, 4), ("b", "x", 0, 2.0, 1))
    assert [j.run_id for j, _ in choose(jobs, {}, GPUS, ["gpu:0"], 100.0, backfill_s=600).launches] == ["b"]
    assert choose(jobs, {}, GPUS, ["gpu:0"], 601.0, backfill_s=600).launches == []
    assert [j.run_id for j, _ in choose(jobs, {}, GPUS, [], 601.0, backfill_s=600).launches] == ["a"]


def test_a_job_that_waits_for_named_devices_holds_up_only_those(queue):
    jobs = queue(("a", "x", 0, 1.0, ("gpu:0", "gpu:1")), ("b", "x", 0, 2.0, 1), ("c", "x", 0, 3.0, 1))
    chosen = choose(jobs, {}, GPUS, ["gpu:0"], 1000.0, backfill_s=600).launches
    assert [(j.run_id, d) for j, d in chosen] == [("b", ("gpu:2",)), ("c", ("gpu:3",))]


def test_a_job_that_can_never_fit_holds_up_nobody(queue):
    jobs = queue(("a", "x", 9, 1.0, 8), ("b", "x", 9, 1.0, ("gpu:7",)), ("c", "x", 0, 2.0, 1))
    assert [j.run_id for j, _ in choose(jobs, {}, GPUS, [], 1e9).launches] == ["c"]


@pytest.fixture
def holders(make_job):
    def make(*rows):
        """Each row: name, priority, state, when it was started, its devices."""
        return [
            make_job(state, run_id=name, priority=priority, started_at=at, devices=[f"gpu:{n}" for n in devices])
            for name, priority, state, at, devices in rows
        ]

    return make


def decided(jobs, live, pool=GPUS, **more):
    taken = [slot for job in live for slot in job.devices]
    choice = choose(jobs, {}, pool, taken, 10.0, live=live, **more)
    return "".join(j.run_id for j, _ in choice.launches), [(v.run_id, j.run_id) for v, j in choice.preemptions]


@pytest.mark.parametrize(
    ("wanted", "priority", "paused"),
    [
        (1, 1, "r"),  # the least important, and of those the one that lost least
        (2, 1, "qr"),
        (3, 1, ""),  # s is as important: pausing q and r alone would help nobody
        (3, 6, "qrs"),
        (4, 6, ""),  # t is more important than it
        (4, 10, "qrst"),
        (1, 0, ""),  # equals are never paused
        (("gpu:1",), 1, "r"),
        (("gpu:0",), 1, "q"),  # only who is in the way
        (("gpu:2", "0"), 6, "qs"),
        ("auto", 1, "r"),
    ],
)
def test_who_is_paused_for_whom(queue, holders, wanted, priority, paused):
    jobs = queue(("a", "x", priority, 1.0, wanted))
    live = holders(("q", 0, "running", 5.0, [0]), ("r", 0, "running", 9.0, [1]), ("s", 5, "running", 1.0, [2]), ("t", 9, "running", 1.0, [3]))
    launches, preemptions = decided(jobs, live)
    assert (launches, "".join(sorted(v for v, _ in preemptions))) == ("", paused)
    assert {j for _, j in preemptions} <= {"a"}


def test_nobody_is_paused_unless_it_is_asked_for(queue, holders):
    live = holders(("q", 0, "running", 5.0, [0, 1, 2, 3]))
    choice = choose(queue(("a", "x", 9, 1.0, 1)), {}, GPUS, GPUS, 10.0)
    assert (choice.launches, choice.preemptions) == ([], [])
    assert decided(queue(("a", "x", 9, 1.0, 1)), live)[1] == [("q", "a")]


def test_what_is_being_vacated_is_waited_for_and_kept(queue, holders):
    jobs = queue(("a", "x", 9, 1.0, 2), ("b", "x", 0, 2.0, 1))
    live = holders(("q", 0, "stopping", 5.0, [0]), ("r", 0, "running", 6.0, [2]), ("s", 9, "running", 6.0, [3]))
    # gpu:1 is free and q leaves: a needs nobody else, and b must not slip onto gpu:1.
    assert decided(jobs, live) == ("", [])
    assert decided(jobs[1:], live) == ("b", [])


def test_a_launch_is_not_taken_for_a_victim_and_no_victim_is_taken_twice(queue, holders):
    launching = holders(("q", 0, "launching", None, [0, 1, 2, 3]))
    assert decided(queue(("a", "x", 9, 1.0, 1)), launching) == ("", [])
    jobs = queue(("a", "x", 9, 1.0, 1), ("b", "x", 8, 2.0, 1))
    live = holders(("q", 0, "running", 5.0, [0]), ("r", 0, "running", 6.0, [1]))
    assert decided(jobs, live, pool=GPUS[:2]) == ("", [("r", "a"), ("q", "b")])
    assert decided(jobs, live[:1], pool=GPUS[:1]) == ("", [("q", "a")])


def test_a_big_victim_makes_room_for_two(queue, holders):
    jobs = queue(("a", "x", 9, 1.0, 1), ("b", "x", 8, 2.0, 1), ("c", "x", 7, 2.0, 1))
    live = holders(("q", 0, "running", 5.0, [0, 1]), ("r", 7, "running", 5.0, [2, 3]))
    assert decided(jobs, live) == ("", [("q", "a")])
