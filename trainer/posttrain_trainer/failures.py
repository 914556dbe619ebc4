"""Any exception -> the contract's error: what torch, the operating system and libraries raise, in the project's words.

Loads no torch, so that a failing import can be told about as well.
"""

from __future__ import annotations

import errno
import re
import traceback

from posttrain_trainer.contract.errors import DiskFull, InvalidArguments, LaunchFailed, Lost, OutOfMemory, TrainerError

_NO_SPACE = re.compile(r"no space left on device|disk quota exceeded|os error 28\b|file write failed.*enforce fail", re.I)
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc", re.I)
_PEER_GONE = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|gloo.*(timed? ?out|socket|pair)|NCCL (error|communicator)|"
    r"remote process exited|DistBackendError|DistNetworkError|socket .*timeout",
    re.I | re.S,
)
_TRACE_CHARS = 6000


def as_trainer_error(error: BaseException, *, rank: int | None = None) -> TrainerError:
    """The contract's error for an exception, whose causes are looked at too.

    Args:
        error: What was raised. A TrainerError is returned as it is, with the rank filled in.
        rank: Global rank it happened on.
    """
    chain = _chain(error)
    for one in chain:
        if isinstance(one, TrainerError):
            one.rank = rank if one.rank is None else one.rank
            return one
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    details = {"traceback": "".join(traceback.format_exception(error))[-_TRACE_CHARS:]}
    if any(_is_disk_full(one) for one in chain):
        return DiskFull(f"a write failed for lack of disk space; free some and go on from the last checkpoint ({text})", rank=rank, details=details)
    if any(_is_out_of_memory(one) for one in chain):
        remedy = "lower max_batch_len or max_seq_len, use activation_checkpointing or lora, or more ranks"
        return OutOfMemory(f"memory ran out; {remedy} ({_first_line(text)})", rank=rank, details=details)
    if isinstance(error, ModuleNotFoundError):
        return LaunchFailed(f"the trainer's Python lacks the package {error.name!r}; install posttrain[train]", rank=rank, details=details)
    if is_peer_gone(error):
        return Lost(f"another rank vanished while this one waited for it ({_first_line(text)})", rank=rank, details=details)
    if _is_validation_error(error):
        return InvalidArguments(text, rank=rank, details=details)
    return TrainerError(text, rank=rank, details=details)


def is_peer_gone(error: BaseException) -> bool:
    """Whether a collective failed because another rank left: the consequence of a failure, not its cause."""
    return any(_PEER_GONE.search(f"{type(one).__name__}: {one}") is not None for one in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and all that led to it, also those that torch.distributed.checkpoint keeps by rank."""
    found: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop(0)
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        failures = getattr(one, "failures", None)
        if isinstance(failures, dict):
            todo += [pair[0] for pair in failures.values() if isinstance(pair, tuple) and isinstance(pair[0], BaseException)]
        todo += [one.__cause__, one.__context__]
    return found


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return _NO_SPACE.search(str(error)) is not None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def _is_validation_error(error: BaseException) -> bool:
    return type(error).__name__ == "ValidationError" and type(error).__module__.startswith("pydantic")


def _first_line(text: str) -> str:
    return text.splitlines()[0][:500] if text else text
