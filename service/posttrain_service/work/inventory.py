"""What this machine has to train on, asked without torch: NVIDIA devices by NVML, AMD ones by the kernel, else CPU slots."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pynvml

log = logging.getLogger(__name__)

_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""What the amdgpu driver shows to ROCm: one folder for each CPU and GPU."""


def devices(cpu_slots: int) -> list[str]:
    """Names of the slots: "gpu:0", "gpu:1", ... where NVIDIA devices are visible, "rocm:0", ... where AMD ones are, else
    "cpu:0" .. "cpu:<cpu_slots - 1>".

    A server that was started with CUDA_VISIBLE_DEVICES (on ROCm: HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES) offers only
    those devices; empty means none.
    """
    if gpus := _gpus():
        return [f"gpu:{index}" for index in gpus]
    if gpus := _rocm(_KFD_NODES, os.environ):
        return [f"rocm:{index}" for index in gpus]
    return [f"cpu:{index}" for index in range(cpu_slots)]


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


def _rocm(nodes: Path, environ: Mapping[str, str]) -> list[int]:
    """Indices of AMD devices as HIP numbers them: what ROCR_VISIBLE_DEVICES leaves, and of that HIP_VISIBLE_DEVICES."""
    count = sum(_is_gpu(node / "properties") for node in nodes.glob("*"))
    count = len(visible(count, environ.get("ROCR_VISIBLE_DEVICES"), "ROCR_VISIBLE_DEVICES"))
    name = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
    return visible(count, environ.get(name), name)


def _is_gpu(properties: Path) -> bool:
    try:
        lines = properties.read_text().splitlines()
    except OSError as error:  # a container that isn't given this device
        log.debug("%s: %s", properties, error)
        return False
    facts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return facts.get("simd_count", "0") != "0"


def visible(count: int, setting: str | None, name: str = "CUDA_VISIBLE_DEVICES") -> list[int]:
    """Indices below `count` that a variable like CUDA_VISIBLE_DEVICES leaves visible; None leaves all.

    Raises:
        ValueError: The setting names devices by UUID, which slots have no name for.
    """
    if setting is None:
        return list(range(count))
    parts = [part.strip() for part in setting.split(",") if part.strip()]
    if not all(part.lstrip("-").isdigit() for part in parts):
        raise ValueError(
            f"{name} is {setting!r}: start the server with device numbers (such as 0,1), "
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
