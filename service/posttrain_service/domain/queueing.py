"""The order of the queue and who is launched next. Pure.

Highest priority first; among equals the owner with the fewest jobs (running, or ahead in the queue); then the oldest.
A job whose devices aren't free is overtaken by later ones that fit (back-fill), but not for ever: once it has waited
`backfill_s`, nothing that could delay it is launched any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from posttrain_service.domain.job import DevicesWanted, Job
from posttrain_service.domain.slots import fit, resolve
from posttrain_service.errors import InvalidRequest

BACKFILL_S = 600.0
"""Longest time that a job which does not fit is overtaken."""


def order(queued: Sequence[Job], live_by_owner: Mapping[str, int]) -> list[Job]:
    """The queued jobs in the order in which they are served.

    Args:
        queued: Jobs that wait.
        live_by_owner: Jobs of each owner that have devices now.
    """
    shares = Counter(live_by_owner)
    ordered: list[Job] = []
    for priority in sorted({job.priority for job in queued}, reverse=True):
        lanes: dict[str, list[Job]] = {}
        for job in sorted((j for j in queued if j.priority == priority), key=_age, reverse=True):
            lanes.setdefault(job.owner, []).append(job)  # oldest last, to be popped
        while lanes:
            owner = min(lanes, key=lambda name: (shares[name], _age(lanes[name][-1])))
            ordered.append(lanes[owner].pop())
            shares[owner] += 1
            if not lanes[owner]:
                del lanes[owner]
    return ordered


def choose(
    queued: Sequence[Job],
    live_by_owner: Mapping[str, int],
    pool: Sequence[str],
    taken: Collection[str],
    now: float,
    *,
    backfill_s: float = BACKFILL_S,
) -> list[tuple[Job, tuple[str, ...]]]:
    """The jobs to launch now, each with its devices, in order.

    Args:
        queued: Jobs that wait.
        live_by_owner: Jobs of each owner that have devices now.
        pool: Every slot of this host.
        taken: Slots in use.
        now: The time.
        backfill_s: Longest time that a job which does not fit is overtaken.
    """
    busy = set(taken)
    chosen: list[tuple[Job, tuple[str, ...]]] = []
    for job in order(queued, live_by_owner):
        if busy.issuperset(pool):
            break
        if _impossible(job.devices_wanted, pool):
            continue  # the host lost devices since the job was accepted; its deadline ends it
        devices = fit(job.devices_wanted, pool, busy)
        if devices is not None:
            busy.update(devices)
            chosen.append((job, devices))
        elif now - job.moved_at >= backfill_s:
            busy.update(_reserved(job.devices_wanted, pool))
    return chosen


def positions(queued: Sequence[Job], live_by_owner: Mapping[str, int]) -> dict[str, int]:
    """run_id -> place in the queue, from 1."""
    return {job.run_id: place for place, job in enumerate(order(queued, live_by_owner), start=1)}


def _reserved(wanted: DevicesWanted, pool: Sequence[str]) -> tuple[str, ...]:
    """Slots that must be left to a job that has waited too long."""
    return resolve(wanted, pool) if isinstance(wanted, tuple) else tuple(pool)


def _impossible(wanted: DevicesWanted, pool: Sequence[str]) -> bool:
    if not isinstance(wanted, tuple):
        return isinstance(wanted, int) and wanted > len(pool)
    try:
        resolve(wanted, pool)
    except InvalidRequest:
        return True
    return False


def _age(job: Job) -> tuple[float, str]:
    return job.moved_at, job.run_id
