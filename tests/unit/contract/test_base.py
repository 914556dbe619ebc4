"""What all models of arguments and requests share."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from posttrain_service.wire.jobs import CheckpointRules, JobRequest, LoraAdapter, Resources, Retention, Retry
from posttrain_service.wire.knobs import TorchrunKnobs, TrainingKnobs
from posttrain_service.wire.openai_request import CreateFineTuningJob, Hyperparameters
from posttrain_service.wire.openai_shapes import CompleteUpload, CreateUpload
from posttrain_trainer.contract.base import Disagreement, Model
from posttrain_trainer.contract.methods import DpoMethod, PretrainMethod, QatArguments
from posttrain_trainer.contract.spec import FsdpArguments, FullTrainingArguments, LoraArguments, TorchrunArguments

MODELS = [
    FullTrainingArguments, TorchrunArguments, LoraArguments, FsdpArguments, DpoMethod, PretrainMethod, QatArguments,
    JobRequest, TrainingKnobs, TorchrunKnobs, LoraAdapter, Resources, CheckpointRules, Retention, Retry,
    CreateFineTuningJob, Hyperparameters, CreateUpload, CompleteUpload,
]  # fmt: skip


def leaves(annotation: object) -> Iterator[object]:
    arguments = typing.get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from leaves(argument)


def faults(model: type[BaseModel], value: dict[str, object]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    return [".".join(map(str, error["loc"])) + ": " + error["msg"] for error in caught.value.errors()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("value", [True, False])
def test_no_field_takes_true_or_false_for_a_number(model, value):
    for name, info in model.model_fields.items():
        kinds = set(leaves(info.annotation))
        if bool in kinds:
            continue
        given = [value] if tuple in {typing.get_origin(part) for part in (info.annotation, *typing.get_args(info.annotation))} else value
        for sent in (value, given):
            found = [fault for fault in faults(model, {name: sent, "kind": "x"}) if fault.startswith(name)]
            assert found, name
        if int in kinds or float in kinds:
            found = [fault for fault in faults(model, {name: given}) if fault.startswith(name)]
            assert any(f"must be a number, not {str(value).lower()}" in fault for fault in found), (name, found)


class Sample(Model):
    one: int
    several: list[int | str] | dict[str, float] = []  # noqa: RUF012
    either: int | bool = 1
    text: str = ""


def test_numbers_are_still_numbers_and_booleans_booleans():
    found = Sample.model_validate({"one": "3", "several": {"a": "2e-6"}, "either": True})
    assert (found.one, found.several, found.either) == (3, {"a": 2e-6}, True)
    assert Sample.model_json_schema()["properties"]["one"] == {"title": "One", "type": "integer"}
    assert faults(Sample, {"one": 1, "several": [1, True]})


def test_a_disagreement_names_its_fields_as_the_reader_knows_them():
    error = Disagreement("{a.b} ({got}) is below {c}", got=3)
    assert str(error) == "a.b (3) is below c"
    assert error.fields == ["a.b", "c"]
    assert error.told(lambda name: f"x.{name}") == "x.a.b (3) is below x.c"
