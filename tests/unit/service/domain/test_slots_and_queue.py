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
    assert [(j.run_id, d) for j, d in choose(jobs, {}, GPUS, [], 10.0)] == [
        ("a", ("gpu:0", "gpu:1")),
        ("b", ("gpu:2",)),
    ]
    assert choose(jobs, {}, GPUS, GPUS, 10.0) == []


def test_back_fill_does_not_starve_the_job_it_overtakes(queue):
    jobs = queue(("a", "x", 0, 1.0, 4), ("b", "x", 0, 2.0, 1))
    assert [j.run_id for j, _ in choose(jobs, {}, GPUS, ["gpu:0"], 100.0, backfill_s=600)] == ["b"]
    assert choose(jobs, {}, GPUS, ["gpu:0"], 601.0, backfill_s=600) == []
    assert [j.run_id for j, _ in choose(jobs, {}, GPUS, [], 601.0, backfill_s=600)] == ["a"]


def test_a_job_that_waits_for_named_devices_holds_up_only_those(queue):
    jobs = queue(("a", "x", 0, 1.0, ("gpu:0", "gpu:1")), ("b", "x", 0, 2.0, 1), ("c", "x", 0, 3.0, 1))
    chosen = choose(jobs, {}, GPUS, ["gpu:0"], 1000.0, backfill_s=600)
    assert [(j.run_id, d) for j, d in chosen] == [("b", ("gpu:2",)), ("c", ("gpu:3",))]


def test_a_job_that_can_never_fit_holds_up_nobody(queue):
    jobs = queue(("a", "x", 9, 1.0, 8), ("b", "x", 9, 1.0, ("gpu:7",)), ("c", "x", 0, 2.0, 1))
    assert [j.run_id for j, _ in choose(jobs, {}, GPUS, [], 1e9)] == ["c"]
