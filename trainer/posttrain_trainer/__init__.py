"""The trainer library. Importing it loads neither torch nor pydantic; the public names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain_trainer.contract.errors import TrainerError
    from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments
    from posttrain_trainer.launcher import train_torchrun

__version__ = "0.1.0"
__all__ = ["FullTrainingArguments", "TorchrunArguments", "TrainerError", "__version__", "train_torchrun"]

_HOME = {
    "FullTrainingArguments": "posttrain_trainer.contract.spec",
    "TorchrunArguments": "posttrain_trainer.contract.spec",
    "TrainerError": "posttrain_trainer.contract.errors",
    "train_torchrun": "posttrain_trainer.launcher",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562), so that the shim and the service stay light."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
