"""OpenAI's requests and answers, translated: tables of examples."""

import pytest
from pydantic import ValidationError

from posttrain_service.errors import InvalidRequest, UnsupportedMethod
from posttrain_service.wire.openai_request import CreateFineTuningJob, base_rate, resolve_auto, translate
from posttrain_service.wire.openai_views import bad_lines, page_of, results_csv, timeline
from posttrain_service.work.services import EventView

BASE = {"model": "m", "training_file": "file-1"}
ALL_AUTO = ("num_epochs", "effective_batch_size", "warmup_steps")


def hyper(**values):
    return {"method": {"type": "supervised", "supervised": {"hyperparameters": values}}}


def dpo(**values):
    return {"method": {"type": "dpo", "dpo": {"hyperparameters": values}}}


@pytest.mark.parametrize(
    ("asked", "made", "auto"),
    [
        ({}, {"training": {}}, ALL_AUTO),
        (hyper(n_epochs="auto", batch_size="auto", learning_rate_multiplier="auto"), {"training": {}}, ALL_AUTO),
        (hyper(n_epochs=2), {"training": {"num_epochs": 2}}, ALL_AUTO[1:]),
        (hyper(batch_size=4), {"training": {"effective_batch_size": 4}}, (ALL_AUTO[0], ALL_AUTO[2])),
        ({"hyperparameters": {"n_epochs": 2}}, {"training": {"num_epochs": 2}}, ALL_AUTO[1:]),
        (hyper(learning_rate_multiplier=2), {"training": {"learning_rate": 4e-5}}, ALL_AUTO),
        (hyper(learning_rate_multiplier=2) | {"adapter": {"kind": "lora"}}, {"training": {"learning_rate": 4e-4}, "adapter": {"kind": "lora"}}, ALL_AUTO),
        (dpo(beta=0.3, learning_rate_multiplier=2), {"training": {"learning_rate": 1e-6}, "method": {"kind": "dpo", "beta": 0.3}}, ALL_AUTO),
        ({"seed": 3}, {"training": {"random_seed": 3}}, ALL_AUTO),
        ({"suffix": "s"}, {"training": {}, "name": "s"}, ALL_AUTO),
        ({"metadata": {"a": "b"}}, {"training": {}, "metadata": {"a": "b"}}, ALL_AUTO),
        ({"validation_file": "file-2"}, {"training": {}, "validation_dataset": "file-2"}, ALL_AUTO),
        ({"training": {"num_epochs": 5, "warmup_steps": 1}}, {"training": {"num_epochs": 5, "warmup_steps": 1}}, ALL_AUTO[1:2]),
        (
            {"integrations": [{"type": "wandb", "wandb": {"project": "p", "name": "n"}}]},
            {"training": {}, "loggers": [{"kind": "wandb", "project": "p", "name": "n", "mode": "online"}]},
            ALL_AUTO,
        ),
    ],
)  # fmt: skip
def test_requests(asked, made, auto):
    got = translate(CreateFineTuningJob.model_validate(BASE | asked))
    dumped = got.request.model_dump(mode="json", exclude_unset=True)
    assert dumped == {"model": "m", "dataset": "file-1"} | made
    assert (got.auto, got.warnings) == (auto, ())


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo"),
        (hyper(beta=0.1), "hyperparameters.beta"),
        (hyper(n_epochs=2) | {"hyperparameters": {"n_epochs": 3}}, "hyperparameters"),
        (hyper(n_epochs=2) | {"training": {"num_epochs": 3}}, "n_epochs"),
        ({"seed": 1, "training": {"random_seed": 2}}, "seed"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p", "entity": "e"}}]}, "integrations.0.wandb.entity"),
        ({"metadata": {"k" * 65: "v"}}, None),
        ({"webhook_url": "ftp://x"}, "webhook_url"),
        ({"validation_file": "f", "validation_split": 0.5}, "validation_file"),
        ({"training": {"merge_lora": True}}, "training.merge_lora"),
    ],
)
def test_contradictions_are_refused_by_name(asked, param):
    with pytest.raises(InvalidRequest) as caught:
        translate(CreateFineTuningJob.model_validate(BASE | asked))
    assert param is None or caught.value.param == param


@pytest.mark.parametrize("kind", ["reinforcement", "sft", "x"])
def test_other_methods_are_unsupported(kind):
    with pytest.raises(UnsupportedMethod, match="supervised and dpo"):
        translate(CreateFineTuningJob.model_validate(BASE | {"method": {"type": kind}}))


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"suffix": ""}, hyper(n_epochs=0), hyper(n_epochs="many"), hyper(learning_rate_multiplier=0)])
def test_values_out_of_bounds(wrong):
    with pytest.raises(ValidationError):
        CreateFineTuningJob.model_validate(BASE | wrong)


def test_unknown_fields_are_told():
    body = {"odd": 1, "method": {"type": "dpo", "dpo": {"hyperparameters": {"gamma": 1}}}}
    warnings = translate(CreateFineTuningJob.model_validate(BASE | body)).warnings
    assert [warning.split()[0] for warning in warnings] == ["odd", "method.dpo.hyperparameters.gamma"]


@pytest.mark.parametrize(
    ("rows", "epochs", "batch", "warmup"),
    [(1, 3, 1, 0), (10, 3, 1, 1), (300, 3, 15, 2), (999, 3, 32, 3), (1000, 1, 32, 1), (100_000, 1, 32, 94)],
)  # fmt: skip
def test_automatic_values(rows, epochs, batch, warmup):
    training = resolve_auto(BASE_REQUEST, ALL_AUTO, rows).training.model_dump()
    assert (training["num_epochs"], training["effective_batch_size"], training["warmup_steps"]) == (epochs, batch, warmup)


BASE_REQUEST = {"model": "m", "dataset": "file-1", "training": {}}


def test_base_rates():
    assert [base_rate("sft", adapter=False), base_rate("sft", adapter=True), base_rate("dpo", adapter=True)] == [2e-5, 2e-4, 5e-7]


def test_events_and_metrics_are_one_list_newest_first():
    events = [EventView("1", 10.0, "queued", "info", "q"), EventView("2", 30.0, "succeeded", "info", "s")]
    points = [{"step": 1, "time": 20.0, "loss": 0.5, "validation_loss": float("nan")}]
    shown = timeline(events, points, 1)
    assert [(item["id"], item["type"]) for item in shown] == [("ftevent-2", "message"), ("ftevent-step-1", "metrics"), ("ftevent-1", "message")]
    assert shown[1]["data"] == {"step": 1, "total_steps": 1, "train_loss": 0.5, "valid_loss": None}


def test_pages_of_a_list():
    items = [{"id": str(number)} for number in range(5)]
    assert [item["id"] for item in page_of(items, "1", 2)["data"]] == ["2", "3"]
    assert [page_of(items, after, 2)["has_more"] for after in (None, "2", "4")] == [True, False, False]
    assert page_of([], None, 2) == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    with pytest.raises(InvalidRequest):
        page_of(items, "9", 2)


def test_results_are_plain_csv():
    text = results_csv([{"step": 1, "loss": float("nan"), "accuracy": 0.5}, {"step": 2, "validation_loss": 2.0}]).decode()
    assert text == "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n1,,0.5,,\n2,,,2.0,\n"


def test_bad_lines_are_named_and_counted():
    errors = [{"line": number, "message": "bad"} for number in range(1, 24)]
    text = bad_lines(errors)
    assert text.startswith("line 1: bad; line 2: bad")
    assert text.endswith("and 3 more")
