"""The trainer's arguments under the names that a request has for them, so that errors speak of what the caller wrote. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import ValidationError

from posttrain_trainer.contract.base import Disagreement

CHECKPOINT_NAMES = {
    "every_steps": "save_every_steps",
    "every_epoch": "save_every_epoch",
    "keep_last": "keep_last",
    "keep_best": "keep_best",
    "metric": "best_metric",
}
"""Names of `checkpoints` and the trainer's arguments that they set."""

OWN_PATHS = {
    "method": "method",
    "validation_split": "validation_split",
    "lora": "adapter",
    "loggers": "loggers",
    **{to: f"checkpoints.{name}" for name, to in CHECKPOINT_NAMES.items()},
}
"""Arguments that a request has a name of its own for, besides that below `training`."""

_PATHS = {"model_path": "model", "data_path": "dataset", "validation_data_path": "validation_dataset"}


def path_of(argument: str, *, own: Collection[str], training: Collection[str]) -> str:
    """The request's field for an argument of the trainer: the one that was given, else the one that people would give.

    Args:
        argument: Its dotted name, e.g. `lora.rank`.
        own: Arguments that the request gives by its own names.
        training: Arguments that it gives below `training`.
    """
    name, dot, rest = argument.partition(".")
    if name in _PATHS:
        return _PATHS[name] + dot + rest
    if name in OWN_PATHS and (name in own or name not in training):
        return OWN_PATHS[name] + dot + rest
    return f"training.{argument}"


def disagreement(error: ValidationError, name_of: Callable[[str], str]) -> Disagreement | None:
    """The contradiction that the trainer's arguments were refused for, with its fields renamed; None for another fault."""
    for item in error.errors(include_url=False):
        found = item.get("ctx", {}).get("error")
        if isinstance(found, Disagreement):
            return renamed(found, name_of)
    return None


def renamed(error: Disagreement, name_of: Callable[[str], str]) -> Disagreement:
    """The same contradiction with other names for its fields."""

    def field(match: re.Match[str]) -> str:
        return match[0] if match[1] in error.values else "{" + name_of(match[1]) + "}"

    return Disagreement(re.sub(r"\{([a-z_0-9.]+)\}", field, error.text), **error.values)


def real_path(location: Sequence[Any], body: Any, *, missing: bool = False) -> tuple[list[str], bool]:
    """The part of pydantic's location that the caller wrote, and whether pydantic's names of branches of a union were left out.

    Args:
        location: Keys and positions, and among them names of models, types and discriminators.
        body: What was validated.
        missing: The last part is the name of a field that is not there.
    """
    kept: list[str] = []
    left_out = False
    for number, part in enumerate(location):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list | tuple) and isinstance(part, int) and part < len(body)):
            body = body[part]
        elif not (missing and number == len(location) - 1):
            left_out = True
            continue
        kept.append(str(part))
    return kept, left_out
