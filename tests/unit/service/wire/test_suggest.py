"""A misspelt field is told with the one that was most likely meant."""

from __future__ import annotations

import re

import pytest
import yaml

from posttrain_service.cli.profile import PRESETS, read_profile, resolve, template
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.wire.suggest import nearest, with_suggestions
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments


@pytest.mark.parametrize(("given", "meant"), [
    ("modell", "model"),
    ("training.learning_rat", "training.learning_rate"),
    ("learning_rate", "training.learning_rate"),  # a good name in the wrong place
    ("adapter.ranks", "adapter.rank"),
    ("checkpoints.keep_latest", "checkpoints.keep_last"),
    ("zzz", None),
    ("training.zzz", None),
    ("nowhere.rank", "adapter.rank"),
])  # fmt: skip
def test_the_nearest_name(given, meant):
    assert nearest(JobRequest, given) == meant


def test_only_unknown_fields_are_helped():
    faults = [{"loc": "modell", "message": "no such field; check the spelling, or leave it out"}, {"loc": "model", "message": "is required"}]
    assert [fault["message"] for fault in with_suggestions(faults, JobRequest)] == ["no such field; did you mean model?", "is required"]
    assert with_suggestions(faults, None) == faults


def test_profiles_are_helped_too(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("learning_rat: 1")
    with pytest.raises(InvalidRequest, match="did you mean learning_rate"):
        read_profile(path)
    with pytest.raises(InvalidRequest) as caught:
        resolve({"train_args": {"learning_rat": 1, "lora": {"rnk": 4}}, "torch_args": {}}, {})
    messages = [fault["message"] for fault in caught.value.errors]
    assert "no such field; did you mean learning_rate?" in messages
    assert "no such field; did you mean lora.rank?" in messages


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_numbers_of_a_written_profile_are_numbers(preset):
    given = read_profile(PRESETS / f"{preset}.yaml")
    text = template(given)
    written = yaml.safe_load(text)
    rate = written["train_args"]["learning_rate"]
    assert isinstance(rate, float)
    assert rate == float(given["train_args"]["learning_rate"])


def test_every_default_of_a_written_profile_reads_back_as_what_it_is():
    lines = re.findall(r"^  # (\w+): (.+)$", template({"train_args": {}, "torch_args": {}}), re.M)
    known = FullTrainingArguments.model_fields | TorchrunArguments.model_fields
    floats = {name: yaml.safe_load(text) for name, text in lines if name in known and isinstance(known[name].default, float)}
    assert len(floats) >= 4
    assert floats == {name: known[name].default for name in floats}
    assert all(isinstance(value, float) for value in floats.values())
