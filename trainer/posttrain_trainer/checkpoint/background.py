"""Saving beside training: the tensors are copied at a step boundary, and a thread writes the copies while steps go on.

The copy takes, in each rank's host memory, as much as its share of the trained weights and of the optimizer's state, from
the first save to the end of the run. Its room is taken before it is needed, by a thread too: touching new memory costs
several times what copying into it does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain_trainer.contract.events import Manifest
from posttrain_trainer.device import host_memory

_ALOFT_S = 120.0
_NICE = 5


class Room:
    """Host memory for copies of this rank's share of some tensors, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._taking: threading.Thread | None = None

    @property
    def taken(self) -> bool:
        """Whether there is room already, or it is being taken."""
        return self._taking is not None or bool(self._buffers)

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Begin to take the memory for copies of these, in a thread."""
        wanted = {key: (_local(tensor).shape, tensor.dtype) for key, tensor in tensors.items()}
        self._taking = threading.Thread(target=self._touch, args=(wanted,), name="room-for-checkpoints", daemon=True)
        self._taking.start()

    def copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU, of sharded tensors with their place in the whole; valid until the next call."""
        if self._taking is not None:
            self._taking.join()
            self._taking = None
        copies: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            local = _local(tensor)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = self._buffers[key] = torch.empty(local.shape, dtype=local.dtype)
            buffer.copy_(local)
            # The constructor, since DTensor.from_local would move the copy to the mesh's own device.
            copies[key] = DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer  # type: ignore[no-untyped-call]
        return copies

    def _touch(self, wanted: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
        _yield_to_training()
        for key, (shape, dtype) in wanted.items():
            self._buffers[key] = torch.zeros(shape, dtype=dtype)


class Saving:
    """One checkpoint being written; on every rank.

    Args:
        write: Writes it, and returns its manifest; runs in a thread unless `wait` is true.
        wait: Write at once, in the caller's thread.
        started: When saving began (`time.perf_counter`), before anything was copied.
    """

    def __init__(self, write: Callable[[], Manifest], *, wait: bool, started: float) -> None:
        self._write = write
        self._started = started
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.waited = wait
        """Whether it was written at once."""
        self.seconds = 0.0
        """From the beginning to the rename, once it is over."""
        if wait:
            self._run()
        else:
            threading.Thread(target=self._run_aside, name="checkpoint", daemon=True).start()
        self.blocked_s = time.perf_counter() - started
        """Training stood still so long, waiting for the end not included."""

    @property
    def over(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        """Whether it is over without a checkpoint."""
        return self.over and self._error is not None

    def result(self) -> Manifest:
        """Wait for the end.

        Returns:
            The manifest of the complete checkpoint.

        Raises:
            BaseException: What writing failed of; on every rank, if on one.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        assert self._manifest is not None
        return self._manifest

    def let_end(self) -> None:
        """Wait for the end, for some time, whatever it is: for a run that ends with an error of its own."""
        self._over.wait(_ALOFT_S)

    def _run(self) -> None:
        try:
            self._manifest = self._write()
        except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
            self._error = error
        self.seconds = time.perf_counter() - self._started
        self._over.set()

    def _run_aside(self) -> None:
        _yield_to_training()
        self._run()


def has_memory_for_copies(tensors: dict[str, Tensor], ranks_on_host: int) -> bool:
    """Whether copying leaves at least as much host memory free again, when each rank of the host copies as much."""
    size = sum(_local(tensor).nbytes for tensor in tensors.values())
    return host_memory().available_bytes >= 2 * size * ranks_on_host


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _yield_to_training() -> None:
    """Let this thread, and those that it starts, wait for the ones that train where cores are few."""
    if sys.platform == "linux":  # elsewhere niceness is the whole process's
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
