"""Model FLOPs utilisation: the share of the machine's matmul peak that training makes use of; an estimate.

Counted are 6 FLOPs for each parameter and token (2 forward, 4 backward: Kaplan et al. 2020, arXiv:2001.08361), as in
Chowdhery et al. 2022, arXiv:2204.02311, appendix B, without their term for attention. The look-up in the input
embedding multiplies nothing; frozen weights need no gradient of their own, which leaves 4. What is computed twice to
save memory, and padding, is not counted: that is the point of the measure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from posttrain_trainer.device import Device

_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312, "A10": 125, "L40S": 362, "L4": 121,
    "RTX 4090": 165, "MI300X": 1307,
}  # fmt: skip
"""Makers' figures for dense bf16 or fp16 matmuls; the first name that a device's words hold counts."""
_MEASURE_S = 0.03
_LEAST_RUNS = 3
_SIDE = {"cpu": 512}
_SIDE_ELSEWHERE = 4096


@dataclass(frozen=True)
class Peak:
    """The most that one rank's device could do."""

    flops_per_s: float
    """Floating-point operations a second."""
    source: str
    """Where the figure is from, for people."""


@dataclass(frozen=True)
class Mfu:
    """What a step's speed is as a share of the peak.

    Attributes:
        flops_per_token: See `flops_per_token`.
        peak: Of one rank.
        ranks: Number of ranks.
    """

    flops_per_token: float
    peak: Peak
    ranks: int

    def share(self, num_tokens: int, seconds: float) -> float:
        """The utilisation of a step over `num_tokens` of all ranks that took `seconds`."""
        return num_tokens * self.flops_per_token / (seconds * self.peak.flops_per_s * self.ranks)


def flops_per_token(num_parameters: int, num_trainable: int, num_looked_up: int) -> float:
    """FLOPs that one token takes, forward and backward.

    Args:
        num_parameters: All parameters, tied ones once, adapters included.
        num_trainable: Those of them that training changes.
        num_looked_up: Parameters that are only looked up: the input embedding, where it isn't the output head as well.
    """
    multiplied = num_parameters - num_looked_up
    trained = max(0, num_trainable - num_looked_up) if num_trainable == num_parameters else num_trainable
    return 6.0 * trained + 4.0 * (multiplied - trained)


def peak_of(device: Device, dtype: torch.dtype) -> Peak:
    """The device's matmul peak: from the table of GPUs for bf16 and fp16, else measured within some hundredths of a second."""
    if device.kind == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device.torch_device)
        if (known := known_peak(name)) is not None:
            return Peak(known, f"the maker's figure for {name}")
    return _measured(device, dtype)


def known_peak(name: str) -> float | None:
    """FLOP/s of a GPU by the name its driver gives; None for one that the table does not have."""
    words = name.replace("-", " ").split()
    for model, tflops in _TFLOPS.items():
        parts = model.split()
        if all(part in words for part in parts):
            return tflops * 1e12
    return None


def _measured(device: Device, dtype: torch.dtype) -> Peak:
    """Best speed of a square matmul; draws no random numbers, so that a run's are what they are without it."""
    side = _SIDE.get(device.kind, _SIDE_ELSEWHERE)
    matrix = torch.linspace(-1, 1, side * side, device=device.torch_device).to(dtype).view(side, side)
    out = torch.empty_like(matrix)
    best, spent, runs = float("inf"), 0.0, 0
    with torch.no_grad():
        torch.mm(matrix, matrix, out=out)  # the first call sets the library up
        while runs < _LEAST_RUNS or spent < _MEASURE_S:
            device.synchronize()
            started = time.perf_counter()
            torch.mm(matrix, matrix, out=out)
            device.synchronize()
            took = time.perf_counter() - started
            best, spent, runs = min(best, took), spent + took, runs + 1
    return Peak(2 * side**3 / best, f"the fastest of {runs} {str(dtype).removeprefix('torch.')} matmuls of {side} x {side} at the start")
