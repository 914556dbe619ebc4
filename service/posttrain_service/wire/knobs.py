"""The trainer's own knobs as they stand in a request: every argument but those that the service decides itself.

Both models are made from the contract's, so that a knob added there can be asked for at once, with its bounds and its
sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from posttrain_service.wire.base import Wire
from posttrain_trainer.contract.methods import Arguments
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

OWNED_PATHS = frozenset({"model_path", "data_path", "validation_data_path", "ckpt_output_dir", "data_output_dir"})
"""Arguments that the service sets: a request names models and data sets, never paths."""


def _without(source: type[Arguments], owned: frozenset[str], name: str, doc: str) -> type[Wire]:
    fields: dict[str, Any] = {
        key: (info.annotation, info) for key, info in source.model_fields.items() if key not in owned
    }
    return create_model(name, __base__=Wire, __doc__=doc, **fields)


if TYPE_CHECKING:

    class TrainingKnobs(Wire):
        """Every knob of the trainer but the paths, which the service owns."""

    class TorchrunKnobs(Wire):
        """How many ranks run, and where."""

        nproc_per_node: int | Literal["auto", "gpu", "cpu"] = 1

else:
    TrainingKnobs = _without(
        FullTrainingArguments,
        OWNED_PATHS,
        "TrainingKnobs",
        "Every knob of the trainer but the paths, which the service owns.",
    )
    TorchrunKnobs = _without(TorchrunArguments, frozenset(), "TorchrunKnobs", "How many ranks run, and where.")
