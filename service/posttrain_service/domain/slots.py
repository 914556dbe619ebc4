"""Devices as slots: what a job asks for, what a pool has, and whether one fits the other. Pure.

A slot's name is its kind and number: "gpu:0", "cpu:1". One rank runs on each slot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from posttrain_service.domain.job import DevicesWanted
from posttrain_service.errors import InvalidRequest


def fit(wanted: DevicesWanted, pool: Sequence[str], taken: Collection[str]) -> tuple[str, ...] | None:
    """The slots that a job gets now; None when it has to wait.

    Args:
        wanted: A number of slots, "auto", or names (of the form "gpu:0", or just its number).
        pool: Every slot of this host, in order.
        taken: Those in use.

    "auto" gets every accelerator that is free, at least one; on a host without accelerators, one CPU slot.
    """
    free = [slot for slot in pool if slot not in taken]
    if isinstance(wanted, tuple):
        named = resolve(wanted, pool)
        return named if set(named) <= set(free) else None
    if wanted == "auto":
        accelerators = [slot for slot in free if not slot.startswith("cpu:")]
        return tuple(accelerators or free[:1]) or None
    return tuple(free[:wanted]) if len(free) >= wanted else None


def check_fits(wanted: DevicesWanted, pool: Sequence[str]) -> None:
    """Refuse what this host could never give, so that no job waits for ever.

    Raises:
        InvalidRequest: More slots than there are, or one that isn't there.
    """
    if isinstance(wanted, tuple):
        resolve(wanted, pool)
    elif wanted == "auto":
        if not pool:
            raise InvalidRequest("this host has no devices to train on", code="no_devices", param="resources.devices")
    elif wanted > len(pool):
        raise InvalidRequest(
            f"{wanted} devices are asked for, but this host has {len(pool)} ({', '.join(pool)}); ask for fewer"
            + (", or raise POSTTRAIN_CPU_SLOTS" if all(slot.startswith("cpu:") for slot in pool) else ""),
            code="too_many_devices",
            param="resources.devices",
        )


def resolve(names: Sequence[str], pool: Sequence[str]) -> tuple[str, ...]:
    """Slots by name or by number alone, in the order they were given.

    Raises:
        InvalidRequest: A slot isn't there, or is named twice.
    """
    by_name = {slot: slot for slot in pool} | {slot.rsplit(":", 1)[-1]: slot for slot in reversed(pool)}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise InvalidRequest(
            f"this host has no device {', '.join(unknown)}; it has {', '.join(pool) or 'none'}",
            code="unknown_device",
            param="resources.devices",
        )
    slots = tuple(by_name[name] for name in names)
    if len(set(slots)) != len(slots):
        raise InvalidRequest(
            f"a device is named twice: {', '.join(names)}", code="duplicate_device", param="resources.devices"
        )
    return slots
