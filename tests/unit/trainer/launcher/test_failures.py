"""Exceptions of torch, libraries and the system in the contract's words."""

import errno
import subprocess
import sys

import pytest
import torch
from pydantic import BaseModel

from posttrain_trainer.contract.errors import (
    DiskFull,
    InvalidArguments,
    InvalidData,
    LaunchFailed,
    Lost,
    OutOfMemory,
    TrainerError,
)
from posttrain_trainer.failures import as_trainer_error, is_peer_gone


class Safetensors(Exception):
    """SafetensorError has no error number, only text."""


class Checkpoint(Exception):
    """torch.distributed.checkpoint collects what ranks raised."""

    def __init__(self, failures) -> None:
        super().__init__("CheckpointException")
        self.failures = failures


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), DiskFull),
        (Safetensors("I/O error: No space left on device (os error 28)"), DiskFull),
        (Checkpoint({0: (OSError(errno.ENOSPC, "full"), None)}), DiskFull),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), OutOfMemory),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), Lost),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), LaunchFailed),
        (ZeroDivisionError("division by zero"), TrainerError),
        (OSError(errno.EACCES, "Permission denied"), TrainerError),
    ],
)
def test_the_kind_of_failure(error, cls):
    mapped = as_trainer_error(error, rank=3)
    assert type(mapped) is cls
    assert mapped.rank == 3
    assert mapped.details["traceback"]


def test_a_real_allocation_failure():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert isinstance(as_trainer_error(caught.value), OutOfMemory)


def test_causes_are_looked_at():
    outer = RuntimeError("saving failed")
    outer.__cause__ = OSError(errno.ENOSPC, "full")
    assert isinstance(as_trainer_error(outer), DiskFull)


def test_the_contracts_own_errors_stay_what_they_are():
    own = InvalidData("line 3", details={"errors": [{"line": 3}]})
    assert as_trainer_error(own, rank=1) is own
    assert own.rank == 1
    assert as_trainer_error(InvalidData("x", rank=0), rank=1).rank == 0


def test_bad_arguments_are_told_as_such():
    class Arguments(BaseModel):
        rate: float

    with pytest.raises(ValueError) as caught:
        Arguments(rate="much")
    assert isinstance(as_trainer_error(caught.value), InvalidArguments)


def test_only_a_broken_collective_is_a_consequence():
    assert is_peer_gone(RuntimeError("Connection reset by peer"))
    assert not is_peer_gone(ValueError("bad value"))


def test_it_loads_without_torch():
    code = "import sys, posttrain_trainer.failures, posttrain_trainer.signals, posttrain_trainer.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
