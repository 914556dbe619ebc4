"""What this machine has to train on, asked without torch: NVIDIA devices by NVML, else CPU slots by setting."""

from __future__ import annotations

import logging
import os

import pynvml

log = logging.getLogger(__name__)


def devices(cpu_slots: int) -> list[str]:
    """Names of the slots: "gpu:0", "gpu:1", ... where NVIDIA devices are visible, else "cpu:0" .. "cpu:<cpu_slots - 1>".

    A server that was started with CUDA_VISIBLE_DEVICES offers only those devices; empty means none.
    """
    gpus = _gpus()
    return [f"gpu:{index}" for index in gpus] if gpus else [f"cpu:{index}" for index in range(cpu_slots)]


def _gpus() -> list[int]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("no NVIDIA device: %s", error)
        return []
    try:
        count = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    return visible(count, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(count: int, setting: str | None) -> list[int]:
    """Indices below `count` that a CUDA_VISIBLE_DEVICES of `setting` leaves visible; None leaves all.

    Raises:
        ValueError: The setting names devices by UUID, which slots have no name for.
    """
    if setting is None:
        return list(range(count))
    parts = [part.strip() for part in setting.split(",") if part.strip()]
    if not all(part.lstrip("-").isdigit() for part in parts):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {setting!r}: start the server with device numbers (such as 0,1), "
            "since jobs are given devices by number"
        )
    indices: list[int] = []
    for part in parts:
        index = int(part)
        # As CUDA does: the first number that names no device hides all after it.
        if not 0 <= index < count:
            break
        indices.append(index)
    return indices
