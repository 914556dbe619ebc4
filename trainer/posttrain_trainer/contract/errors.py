"""The errors a trainer can end with: a stable code, a sentence, and whether another attempt makes sense.

Standard library only. Each failing rank writes its error as `error-rank-<r>.json`; whoever reads that file gets the
same error back by `TrainerError.from_json`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TrainerError(Exception):
    """A training run that did not reach its end.

    Attributes:
        code: Stable machine-readable name of the kind of failure.
        message: What is wrong, with which value, and what to do.
        retryable: Whether the same arguments may succeed when tried again.
        rank: Global rank that failed first; None when no rank ran.
        exit_code: Exit code of the process that failed (negative: ended by that signal); None when unknown.
        details: JSON-serialisable extras, e.g. `errors`, one `{"line", "message"}` for each bad row.
    """

    code: ClassVar[str] = "trainer_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        exit_code: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.exit_code = exit_code
        self.details = details or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.to_json(),)

    def to_json(self) -> dict[str, Any]:
        """The error as a JSON object with keys code, message, retryable, rank, exit_code, details."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "rank": self.rank,
            "exit_code": self.exit_code,
            "details": self.details,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> TrainerError:
        """Rebuild an error of the class that `data["code"]` names; an unknown code gives a plain TrainerError."""
        return _rebuild(data)


class InvalidArguments(TrainerError):
    """An argument, or a combination of them, that this build or machine cannot honour."""

    code = "invalid_arguments"


class InvalidData(TrainerError):
    """A data set with bad rows, or with nothing left to train on; `details["errors"]` lists lines."""

    code = "invalid_data"


class ModelNotFound(TrainerError):
    """The model path or id leads to nothing loadable."""

    code = "model_not_found"


class OutOfMemory(TrainerError):
    """The device or the host ran out of memory."""

    code = "out_of_memory"


class DiskFull(TrainerError):
    """A write failed for lack of space; earlier checkpoints are intact."""

    code = "disk_full"


class NonFiniteLoss(TrainerError):
    """Loss or gradients were not finite for more steps in a row than `max_skipped_steps` allows."""

    code = "non_finite_loss"


class CheckpointInvalid(TrainerError):
    """A checkpoint that was asked for by name is incomplete, altered or belongs to other arguments."""

    code = "checkpoint_invalid"


class LaunchFailed(TrainerError):
    """torchrun could not be started, or ended before any rank could say why."""

    code = "launch_failed"
    retryable = True


class Lost(TrainerError):
    """The process tree vanished without a record (killed, or the host went away)."""

    code = "lost"
    retryable = True


_CLASSES: dict[str, type[TrainerError]] = {
    cls.code: cls
    for cls in (
        InvalidArguments,
        InvalidData,
        ModelNotFound,
        OutOfMemory,
        DiskFull,
        NonFiniteLoss,
        CheckpointInvalid,
        LaunchFailed,
        Lost,
    )
}


def _rebuild(data: dict[str, Any]) -> TrainerError:
    cls = _CLASSES.get(str(data.get("code")), TrainerError)
    return cls(
        str(data.get("message", "the trainer gave no message")),
        rank=data.get("rank"),
        exit_code=data.get("exit_code"),
        details=data.get("details") or {},
    )
