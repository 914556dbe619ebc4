"""When the loop steps, skips, validates, saves and stops: with a model of one weight and made-up parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain_trainer.checkpoint.background import Saving
from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.contract.errors import NonFiniteLoss
from posttrain_trainer.contract.events import Manifest, MetricsPoint
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.loader import StepBatches
from posttrain_trainer.loop import Loop, Parts
from posttrain_trainer.losses.cross_entropy import MicroLoss
from posttrain_trainer.metrics.heartbeat import Heart
from posttrain_trainer.metrics.jsonl import EventLog
from posttrain_trainer.metrics.sink import FanOut

BATCH, TOKENS, SUPERVISED = 4, 40, 10


class Alone:
    """A world of one rank without a process group."""

    rank, world_size, is_main = 0, 1, True
    device = SimpleNamespace(
        kind="cpu", torch_device=torch.device("cpu"), synchronize=lambda: None, memory=lambda: SimpleNamespace(peak_bytes=7)
    )

    def sum(self, values):
        return list(values)

    def any(self, flag):
        return bool(flag)

    def broadcast(self, value):
        return value


@dataclass
class Micro:
    """A micro-batch that is what its loss per token will be."""

    loss: float
    num_supervised: int = SUPERVISED

    def to(self, _device):
        return self


class Loader:
    """Steps of one micro-batch each; `losses[i]` is the loss of step i + 1."""

    def __init__(self, losses: list[float], steps_per_epoch: int) -> None:
        self._losses = losses
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = len(losses)
        self.step = 0

    def __next__(self) -> StepBatches:
        batch: Any = Micro(self._losses[self.step])
        self.step += 1
        return StepBatches([batch], BATCH, TOKENS, SUPERVISED, self.step / self.steps_per_epoch)

    def state_dict(self):
        return {"step": self.step}


class Stop:
    def __init__(self, at_ask: int | None = None, want: str = "pause") -> None:
        self._asks = 0
        self._at_ask = at_ask
        self._want = want
        self.waits = False

    def wait_for_steps(self) -> None:
        self.waits = True

    @property
    def pending(self) -> bool:
        assert self.waits
        self._asks += 1
        return self._at_ask is not None and self._asks >= self._at_ask

    def want(self):
        return self._want


@dataclass
class Bench:
    """A loop with everything around it replaced, and what it did."""

    args: FullTrainingArguments
    loader: Loader
    stop: Stop = field(default_factory=Stop)
    validation: list[Micro] = field(default_factory=list)
    saved: list[tuple[str, int, bool]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    points: list[MetricsPoint] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)
    slow: list[Any] = field(default_factory=list)
    savings: list[Any] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.module = torch.nn.Module()
        self.module.weight = self.weight
        self.optimizer = torch.optim.SGD([self.weight], lr=123.0)
        self.optimizer.register_step_pre_hook(lambda optimizer, *_: self.rates.append(optimizer.param_groups[0]["lr"]))
        self.events = EventLog(None, attempt=2)

    metric_names = ("rewards_margin",)
    is_likelihood = True

    def count(self, of):
        return of.num_supervised

    def before_step(self, _model, batches):
        self.announced.append(len(batches))

    def __call__(self, _model, batch):
        # The gradient of the loss per token is the loss itself, as far as the tests care.
        return MicroLoss(self.weight * batch.loss * SUPERVISED, torch.tensor(3), torch.tensor([SUPERVISED / 2]))

    def save(self, progress, trigger, metrics, *, merge, wait):
        self.saved.append((trigger, progress.step, merge))
        self.metrics.append(metrics)
        saving = Saving(lambda: manifest(progress.step, merged=merge), wait=True, started=0.0) if wait or not self.slow else self.slow.pop(0)(progress.step)
        self.savings.append(saving)
        return saving

    def run(self, progress: Progress | None = None, newest: Manifest | None = None) -> tuple[str | None, Progress]:
        progress = progress or Progress()
        sink = SimpleNamespace(name="memory", write=self.points.append, close=lambda: None)
        parts = Parts(
            args=self.args, attempt=2, world=Alone(), model=SimpleNamespace(module=self.module, set_sync=lambda _last: None),
            objective=self, optimizer=self.optimizer, loader=self.loader, validation=self.validation,
            checkpoints=SimpleNamespace(save=self.save, take_room=lambda: self.rooms.append(progress.step)), points=FanOut([sink], self.events.warn), events=self.events,
            heart=Heart(None), stop=self.stop, first_step_done=lambda: None,
        )  # fmt: skip
        self.loop = Loop(parts, progress, newest)
        return self.loop.run(), progress


def manifest(step: int, *, merged: bool = False) -> Manifest:
    files = [{"path": "merged/model.safetensors", "size_bytes": 1, "sha256": ""}] if merged else []
    return Manifest(
        id=f"step-{step:06d}", step=step, epoch=0.0, samples_seen=0, attempt=1, created_at=0.0, kind="full", trigger="steps",
        arguments_digest="d", files=files,
    )  # fmt: skip


def bench(steps: int = 6, *, losses: list[float] | None = None, steps_per_epoch: int = 3, **knobs: Any) -> Bench:
    parts = {name: knobs.pop(name) for name in ("stop", "validation") if name in knobs}
    base = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "lr_scheduler": "constant", "learning_rate": 0.1, "save_every_epoch": False}
    return Bench(FullTrainingArguments(**{**base, **knobs}), Loader(losses or [0.5] * steps, steps_per_epoch), **parts)


def test_every_step_is_counted_and_reported():
    b = bench(3)
    want, progress = b.run()
    assert want is None
    assert (progress.step, progress.samples_seen, progress.tokens_seen, progress.epoch) == (3, 12, 120, 1.0)
    assert progress.loader == {"step": 3}
    assert [point.step for point in b.points] == [1, 2, 3]
    first = b.points[0]
    assert (first.attempt, first.samples, first.tokens, first.supervised_tokens, first.memory_bytes) == (2, 4, 40, 10, 7)
    assert first.loss == pytest.approx(0.5)
    assert first.grad_norm == pytest.approx(0.5)
    assert first.accuracy == pytest.approx(0.3)
    assert first.tokens_per_s == pytest.approx(40 / first.step_time_s)
    assert first.forward_time_s + first.backward_time_s + first.optimizer_time_s <= first.step_time_s
    assert first.skipped is None


def test_an_epoch_is_summed_up_over_its_steps():
    b = bench(losses=[0.5, float("nan"), 1.5, 2.0, 2.0, 2.0])
    told = []
    b.events.tell = lambda kind, text, **data: told.append((kind, text, data))
    b.run()
    (_, text, first), (_, _, second) = [event for event in told if event[0] == "epoch"]
    assert (first["epoch"], first["step"], first["steps"], first["skipped"], first["tokens"]) == (1, 3, 3, 1, 3 * TOKENS)
    applied = [point for point in b.points[:3] if not point.skipped]
    assert first["loss"] == pytest.approx(sum(point.loss for point in applied) / 2)
    assert first["accuracy"] == pytest.approx(0.3)
    assert first["tokens_per_s"] == pytest.approx(3 * TOKENS / sum(point.step_time_s for point in b.points[:3]), rel=0.01)
    assert f"mean loss {first['loss']:.4f}" in text
    assert (second["steps"], "skipped" in second) == (3, False)


def test_weights_move_by_the_scheduled_rate():
    b = bench(2, warmup_steps=2, max_grad_norm=None)
    b.run()
    assert b.rates == pytest.approx([0.05, 0.1])
    assert b.weight.item() == pytest.approx(1 - 0.05 * 0.5 - 0.1 * 0.5)


def test_large_gradients_are_scaled_down_to_the_limit():
    b = bench(losses=[50.0], max_grad_norm=1.0)
    b.run()
    assert b.points[0].grad_norm == pytest.approx(50.0)
    assert b.weight.item() == pytest.approx(1 - 0.1 * 1.0, abs=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_counted(broken):
    b = bench(losses=[broken, 0.5])
    _, progress = b.run()
    assert b.weight.item() == pytest.approx(1 - 0.1 * 0.5)
    assert (progress.skipped_steps, progress.skipped_in_a_row, progress.step) == (1, 0, 2)
    assert (b.points[0].skipped, b.points[0].loss, b.points[0].grad_norm, b.points[0].accuracy) == (True, None, None, None)
    assert b.points[1].skipped is None
    assert any("step 1" in warning for warning in b.events.warnings)


def test_too_many_skipped_steps_in_a_row_end_the_run():
    b = bench(losses=[math.nan, 0.5, math.nan, math.nan, math.nan], max_skipped_steps=2)
    with pytest.raises(NonFiniteLoss, match=r"3 steps in a row, up to step 5"):
        b.run()


def test_checkpoints_by_steps_and_at_the_end():
    b = bench(5, save_every_steps=2)
    b.run()
    assert b.saved == [("steps", 2, False), ("steps", 4, False), ("end", 5, False)]


def test_checkpoints_by_samples():
    b = bench(6, save_samples=10)  # 4 samples a step: 10 are passed in step 3, 20 in step 5
    b.run()
    assert b.saved == [("samples", 3, False), ("samples", 5, False), ("end", 6, False)]


def test_the_end_of_an_epoch_and_of_the_run_are_saved_once():
    b = bench(6, save_every_epoch=True, save_every_steps=3)
    b.run()
    assert b.saved == [("epoch", 3, False), ("end", 6, False)]


def test_a_pause_saves_at_the_step_boundary():
    b = bench(6, stop=Stop(at_ask=2))
    assert b.run()[0] == "pause"
    assert b.saved == [("stop", 2, False)]


def test_a_pause_where_a_checkpoint_is_there_already_saves_nothing_twice():
    b = bench(6, stop=Stop(at_ask=1))
    want, _ = b.run(Progress(step=1), manifest(2))
    assert (want, b.saved) == ("pause", [])


def test_a_cancel_saves_nothing():
    b = bench(6, stop=Stop(at_ask=2, want="cancel"))
    assert b.run()[0] == "cancel"
    assert b.saved == []


def test_a_stop_in_the_last_step_is_a_completed_run():
    b = bench(2, stop=Stop(at_ask=2), validation=[Micro(0.1)], validation_data_path="v")
    assert b.run()[0] is None
    assert b.saved == [("end", 2, False)]
    assert all(point.validation_loss is None for point in b.points)


def test_validation_at_the_end_of_each_epoch_by_default():
    b = bench(6, validation=[Micro(0.2), Micro(0.4, num_supervised=SUPERVISED)], validation_data_path="v")
    b.run()
    validated = [point for point in b.points if point.validation_loss is not None]
    assert [point.step for point in validated] == [3, 6]
    assert validated[0].validation_accuracy == pytest.approx(0.3)
    assert validated[0].validation_perplexity == pytest.approx(math.exp(validated[0].validation_loss))
    assert b.module.training
    assert b.metrics[-1]["validation_loss"] == validated[-1].validation_loss


def test_validation_by_steps_and_at_the_end():
    b = bench(5, validation=[Micro(0.2)], validation_data_path="v", validation_every_steps=2)
    b.run()
    assert [point.step for point in b.points if point.validation_loss is not None] == [2, 4, 5]


def test_keeping_the_best_measures_every_checkpoint():
    b = bench(4, validation=[Micro(0.2)], validation_data_path="v", save_every_steps=2, keep_best=1, steps_per_epoch=4)
    b.run()
    assert all("validation_loss" in metrics for metrics in b.metrics)


def test_metrics_of_a_checkpoint_are_those_of_its_own_step():
    b = bench(4, validation=[Micro(0.2)], validation_data_path="v", validation_every_steps=1, save_every_steps=3, steps_per_epoch=4)
    b.args = b.args.model_copy(update={"validation_every_steps": 2})
    b.run()
    assert [sorted(metrics) for metrics in b.metrics] == [
        ["accuracy", "loss", "rewards_margin"],
        ["accuracy", "loss", "rewards_margin", "validation_accuracy", "validation_loss", "validation_perplexity"],
    ]


def test_an_objective_counts_for_itself_and_adds_its_own_metrics():
    b = bench(2, validation=[Micro(0.2), Micro(0.2)], validation_data_path="v", steps_per_epoch=2)
    b.run()
    assert [point.rewards_margin for point in b.points if point.loss is not None] == [0.5, 0.5]
    assert b.announced == [1, 1, 2]  # each step, then the whole validation
    b = bench(1, validation=[Micro(0.2)], validation_data_path="v", steps_per_epoch=1)
    b.count = lambda of: 2 * of.num_supervised
    b.is_likelihood = False
    b.run()
    first, second = b.points
    assert (first.rewards_margin, first.accuracy) == (0.25, 3 / SUPERVISED / 2)
    assert second.validation_perplexity is None
    assert second.validation_loss is not None


def test_a_stop_during_validation_saves_what_was_trained():
    # One question in each step, then one before each validation batch: the sixth is the second batch after step 4.
    b = bench(8, stop=Stop(at_ask=6), validation=[Micro(0.2)] * 3, validation_data_path="v", validation_every_steps=4)
    assert b.run()[0] == "pause"
    assert b.saved == [("stop", 4, False)]
    assert all(point.validation_loss is None for point in b.points)
    assert b.module.training


def test_a_finished_run_is_left_alone_unless_the_merged_model_is_missing():
    b = bench(3)
    b.run(Progress(step=3), manifest(3))
    assert (b.saved, b.points) == ([], [])
    merging = bench(3, lora={"rank": 2}, merge_lora=True)
    merging.run(Progress(step=3), manifest(3))
    assert merging.saved == [("end", 3, True)]
    merged = bench(3, lora={"rank": 2}, merge_lora=True)
    merged.run(Progress(step=3), manifest(3, merged=True))
    assert merged.saved == []
