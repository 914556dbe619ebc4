"""The order of the queue and who is launched next. Pure.

Highest priority first; among equals the owner with the fewest jobs (running, or ahead in the queue); then the oldest.
A job whose devices aren't free is overtaken by later ones that fit (back-fill), but not for ever: once it has waited
`backfill_s`, nothing that could delay it is launched any more. With pre-emption, running jobs of lower priority are
paused for it: the least important first, then the one that has run for the shortest time, and never more than needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain_service.domain.job import DevicesWanted, Job
from posttrain_service.domain.lifecycle import JobState
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


@dataclass
class Choice:
    """What is to be done now."""

    launches: list[tuple[Job, tuple[str, ...]]] = field(default_factory=list)
    """The jobs to launch, each with its devices, in order."""
    preemptions: list[tuple[Job, Job]] = field(default_factory=list)
    """The running jobs to pause, each with the queued job that needs its devices."""


def choose(
    queued: Sequence[Job],
    live_by_owner: Mapping[str, int],
    pool: Sequence[str],
    taken: Collection[str],
    now: float,
    *,
    backfill_s: float = BACKFILL_S,
    live: Sequence[Job] | None = None,
) -> Choice:
    """The jobs to launch now, and those to pause for others.

    Args:
        queued: Jobs that wait.
        live_by_owner: Jobs of each owner that have devices now.
        pool: Every slot of this host.
        taken: Slots in use.
        now: The time.
        backfill_s: Longest time that a job which does not fit is overtaken.
        live: The jobs that have devices now; None = nothing is pre-empted.
    """
    busy = set(taken)
    kept: set[str] = set()  # slots that are launched on, or will be by a job that goes first
    choice = Choice()
    for job in order(queued, live_by_owner):
        if live is None and busy.issuperset(pool):
            break
        if _impossible(job.devices_wanted, pool):
            continue  # the host lost devices since the job was accepted; its deadline ends it
        devices = fit(job.devices_wanted, pool, busy)
        if devices is not None:
            busy.update(devices)
            kept.update(devices)
            choice.launches.append((job, devices))
            continue
        leaving = [victim for victim, _ in choice.preemptions]
        leaving += [j for j in live or () if j.state is JobState.STOPPING]
        room = None if live is None else _make_room(job, live, leaving, pool, busy, kept)
        if room is not None:
            victims, devices = room
            choice.preemptions += [(victim, job) for victim in victims]
            busy.update(devices)  # or a less important job would take what has been vacated already
            kept.update(devices)
        elif now - job.moved_at >= backfill_s:
            busy.update(_reserved(job.devices_wanted, pool))
    return choice


def _make_room(
    job: Job, live: Sequence[Job], leaving: Sequence[Job], pool: Sequence[str], busy: Collection[str], kept: Collection[str]
) -> tuple[list[Job], tuple[str, ...]] | None:
    """Whom to pause for a job, and the slots it will get; None when no pausing helps."""

    def slots_without(victims: Sequence[Job]) -> tuple[str, ...] | None:
        vacated = {slot for j in [*leaving, *victims] for slot in j.devices}
        return fit(job.devices_wanted, pool, (set(busy) - vacated) | set(kept))

    victims: list[Job] = []
    gone = {j.run_id for j in leaving}
    running = [j for j in live if j.state is JobState.RUNNING and j.priority < job.priority and j.run_id not in gone]
    for candidate in [None, *sorted(running, key=lambda j: (j.priority, -(j.started_at or 0.0), j.run_id))]:
        victims += [] if candidate is None else [candidate]  # None: what is being vacated anyway may do
        if slots_without(victims) is not None:
            break
    for victim in reversed(victims):  # one that was taken before the fitting ones were found may stay
        if slots_without([v for v in victims if v is not victim]) is not None:
            victims.remove(victim)
    devices = slots_without(victims)
    return None if devices is None else (victims, devices)


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
