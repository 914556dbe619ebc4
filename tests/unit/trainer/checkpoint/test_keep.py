"""Which checkpoints stay."""

import math

import pytest

from posttrain_trainer.checkpoint.keep import best, newest_first, to_delete
from posttrain_trainer.contract.events import Manifest


def manifest(step: int, *, attempt: int = 1, **metrics: float) -> Manifest:
    return Manifest(
        id=f"step-{step:06d}", step=step, epoch=0.0, samples_seen=step, attempt=attempt, created_at=0.0, kind="full",
        trigger="steps", metrics=metrics, arguments_digest="d", files=[],
    )  # fmt: skip


def gone(manifests, *, keep_last=1, keep_best=0, best_metric="validation_loss"):
    return to_delete(manifests, keep_last=keep_last, keep_best=keep_best, best_metric=best_metric)


def test_the_newest_stay_and_the_oldest_goes_first():
    assert gone([manifest(30), manifest(10), manifest(20)]) == ["step-000010", "step-000020"]


def test_nothing_goes_while_there_are_few():
    assert gone([manifest(10), manifest(20)], keep_last=2) == []
    assert gone([], keep_last=1) == []


def test_steps_are_numbers_not_text():
    assert gone([manifest(999_999), manifest(1_000_000)]) == ["step-999999"]


def test_a_run_started_anew_keeps_what_it_writes_itself():
    old, new = manifest(100, attempt=1), manifest(10, attempt=2)
    assert newest_first([old, new]) == [new, old]
    assert gone([old, new]) == ["step-000100"]


def test_the_best_stay_besides_the_newest():
    losses = {10: 0.9, 20: 0.2, 30: 0.5, 40: 0.7}
    found = gone([manifest(step, validation_loss=loss) for step, loss in losses.items()], keep_best=1)
    assert found == ["step-000010", "step-000030"]


def test_accuracy_is_best_when_high():
    manifests = [manifest(10, validation_accuracy=0.9), manifest(20, validation_accuracy=0.1), manifest(30)]
    assert gone(manifests, keep_best=1, best_metric="validation_accuracy") == ["step-000020"]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_checkpoint_without_a_usable_metric_is_nobodys_best(value):
    metrics = {} if value is None else {"validation_loss": value}
    assert gone([manifest(10, **metrics), manifest(20, validation_loss=5.0), manifest(30)], keep_best=1) == ["step-000010"]


def test_of_equals_the_newest_is_the_best():
    manifests = [manifest(step, loss=1.0) for step in (10, 20, 30)]
    assert [one.id for one in best(manifests, "loss")] == ["step-000030", "step-000020", "step-000010"]
