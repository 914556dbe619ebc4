"""The training loop, readable from top to bottom: accumulate, clip, step, log, validate, save, stop.

It knows when, not what: the objective says what a micro-batch is asked for, sinks say where numbers go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from posttrain_trainer.checkpoint.inflight import InFlight
from posttrain_trainer.checkpoint.save import Trigger
from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.checkpoint.store import Checkpoints
from posttrain_trainer.contract.errors import NonFiniteLoss
from posttrain_trainer.contract.events import Manifest, MetricsPoint, StopWant
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.batch import Batch
from posttrain_trainer.data.loader import StepBatches, StepLoader
from posttrain_trainer.dist import World
from posttrain_trainer.metrics.heartbeat import Heart
from posttrain_trainer.metrics.jsonl import EventLog
from posttrain_trainer.metrics.meter import EpochMeans, Pace, Stopwatch, Sums, Totals, device_marks, finite
from posttrain_trainer.metrics.mfu import Mfu
from posttrain_trainer.metrics.sink import FanOut
from posttrain_trainer.models.load import LoadedModel
from posttrain_trainer.objectives.base import Objective
from posttrain_trainer.optim.schedule import learning_rate
from posttrain_trainer.signals import StopRequests


@dataclass(frozen=True)
class Parts:
    """Everything the loop works with, made by `build`."""

    args: FullTrainingArguments
    attempt: int
    world: World
    model: LoadedModel
    objective: Objective
    optimizer: Optimizer
    loader: StepLoader
    validation: Sequence[Batch]
    checkpoints: Checkpoints
    points: FanOut
    events: EventLog
    heart: Heart
    stop: StopRequests
    first_step_done: Callable[[], None]
    mfu: Mfu | None = None
    around_step: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()


class Loop:
    """Trains from `progress` to the last planned step, or to the boundary where all ranks agree to stop.

    Args:
        parts: What to work with.
        progress: Where to begin; counted up in place.
        newest: The checkpoint the run goes on from, if any.
    """

    def __init__(self, parts: Parts, progress: Progress, newest: Manifest | None) -> None:
        self.parts = parts
        self.progress = progress
        self._saves = InFlight(newest, parts.events.tell, lambda: self._beat("save"))
        self._pace = Pace()
        self._means = EpochMeans()
        self._metrics: dict[str, float] = {}
        self._parameters = [p for group in parts.optimizer.param_groups for p in group["params"]]
        self._samples_before = progress.samples_seen

    def run(self) -> StopWant | None:
        """Train; returns what was wanted when a stop request ended it, None when every planned step is done.

        Raises:
            NonFiniteLoss: Too many steps in a row were skipped.
            Exception: What a checkpoint could not be written for, at the latest a step after it is known.
        """
        try:
            return self._train()
        finally:
            self._saves.let_end()

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint, as far as it is known to be complete."""
        return self._saves.newest

    def _train(self) -> StopWant | None:
        parts, progress = self.parts, self.progress
        total = parts.loader.total_steps
        parts.stop.wait_for_steps()
        took_room = False
        while progress.step < total:
            with parts.around_step(progress.step + 1):
                stopping = self._step()
            if not took_room and self._saves_before_end():
                parts.checkpoints.take_room()
            took_room = True
            at_end = progress.step >= total
            if not stopping and self._validation_due(at_end):
                stopping = self._validate()
            self._tell_epoch()
            if stopping and not at_end:
                return self._stop()
            if not at_end and (trigger := self._save_due()) is not None:
                self._save(trigger, wait=False)
        self._save_unless_there("end", merge=parts.args.merge_lora)
        return None

    def _step(self) -> bool:
        """One optimizer step over the global batch; returns whether the ranks agreed to stop after it."""
        parts, progress, args = self.parts, self.progress, self.parts.args
        kind = parts.world.device.kind
        watch = Stopwatch(in_step_with_host=kind == "cpu", mark=device_marks(kind))
        with watch.part("data"):
            batches = next(parts.loader)
        sums = self._accumulate(batches, watch)
        with watch.part("optimizer"):
            norm = self._gradient_norm()
            totals = sums.over_ranks(
                parts.world,
                parts.objective.count(batches),
                [float(parts.stop.pending), float(not math.isfinite(norm)), float(self._saves.failed)],
            )
            stopping, broken, unsaved = totals.flags
            applied = math.isfinite(totals.loss) and broken == 0
            rate = learning_rate(args, progress.step + 1, parts.loader.total_steps)
            if applied:
                self._apply(rate, norm)
            parts.optimizer.zero_grad(set_to_none=True)
        parts.world.device.synchronize()
        self._count(batches, applied=applied, loss=totals.loss)
        self._report(batches, watch, rate=rate, norm=norm, totals=totals, applied=applied)
        self._check_skipped()
        if unsaved > 0:
            self._saves.finish()
        self._saves.look()
        return stopping > 0

    def _accumulate(self, batches: StepBatches, watch: Stopwatch) -> Sums:
        """Forward and backward of this rank's micro-batches; gradients are those of the global mean afterwards."""
        parts = self.parts
        device = parts.world.device.torch_device
        sums = Sums(device, len(parts.objective.metric_names))
        # FSDP averages gradients over the ranks; times their number, the sum over all ranks is divided once.
        scale = parts.world.world_size / parts.objective.count(batches)
        parts.objective.before_step(parts.model, batches.micro_batches)
        for number, batch in enumerate(batches.micro_batches, start=1):
            parts.model.set_sync(number == len(batches.micro_batches))
            with watch.part("forward"):
                micro = parts.objective(parts.model, batch.to(device))
            with watch.part("backward"):
                (micro.loss_sum * scale).backward()  # type: ignore[no-untyped-call]
            sums.add(*micro)
            parts.heart.beat("train")
        return sums

    def _gradient_norm(self) -> float:
        """Norm of the whole gradient over all ranks."""
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    def _apply(self, rate: float, norm: float) -> None:
        limit = self.parts.args.max_grad_norm
        if limit is not None:
            clip_grads_with_norm_(self._parameters, limit, torch.tensor(norm, device=self.parts.world.device.torch_device))
        for group in self.parts.optimizer.param_groups:
            group["lr"] = rate
        self.parts.optimizer.step()

    def _count(self, batches: StepBatches, *, applied: bool, loss: float) -> None:
        progress = self.progress
        self._samples_before = progress.samples_seen
        progress.step += 1
        progress.epoch = batches.epoch
        progress.samples_seen += batches.num_samples
        progress.tokens_seen += batches.num_tokens
        progress.loss = finite(loss)
        progress.skipped_steps += not applied
        progress.skipped_in_a_row = 0 if applied else progress.skipped_in_a_row + 1
        progress.loader = self.parts.loader.state_dict()

    def _report(self, batches: StepBatches, watch: Stopwatch, *, rate: float, norm: float, totals: Totals, applied: bool) -> None:
        parts, progress = self.parts, self.progress
        step_time_s = watch.total()
        self._pace.add(step_time_s, batches.num_tokens)
        count = parts.objective.count(batches)
        self._means.add(totals, count=count, tokens=batches.num_tokens, seconds=step_time_s, applied=applied)
        self._metrics = {} if progress.loss is None else {"loss": progress.loss, "accuracy": totals.accuracy, **self._extra(totals)}
        spent = watch.parts()
        parts.points.write(
            MetricsPoint(
                attempt=parts.attempt,
                step=progress.step,
                epoch=progress.epoch,
                time=time.time(),
                loss=progress.loss,
                learning_rate=rate,
                grad_norm=finite(norm),
                tokens=batches.num_tokens,
                supervised_tokens=batches.num_supervised,
                samples=batches.num_samples,
                tokens_per_s=batches.num_tokens / step_time_s,
                step_time_s=step_time_s,
                data_time_s=spent.get("data"),
                forward_time_s=spent.get("forward"),
                backward_time_s=spent.get("backward"),
                optimizer_time_s=spent.get("optimizer"),
                mfu=None if parts.mfu is None else parts.mfu.share(batches.num_tokens, step_time_s),
                memory_bytes=parts.world.device.memory().peak_bytes,
                skipped=None if applied else True,
                accuracy=self._metrics.get("accuracy"),
                **self._extra(totals),
            )
        )
        self._beat("train")
        parts.first_step_done()

    def _extra(self, totals: Totals) -> dict[str, float]:
        """The objective's further metrics, those that are finite."""
        named = zip(self.parts.objective.metric_names, totals.extra, strict=True)
        return {name: value for name, value in named if math.isfinite(value)}

    def _beat(self, phase: str) -> None:
        progress, total = self.progress, self.parts.loader.total_steps
        self.parts.heart.beat(
            phase,  # type: ignore[arg-type]
            step=progress.step,
            total_steps=total,
            epoch=progress.epoch,
            samples_seen=progress.samples_seen,
            tokens_seen=progress.tokens_seen,
            tokens_per_s=self._pace.tokens_per_s,
            eta_s=self._pace.eta_s(total - progress.step),
        )

    def _check_skipped(self) -> None:
        progress, limit = self.progress, self.parts.args.max_skipped_steps
        if progress.skipped_in_a_row > limit:
            raise NonFiniteLoss(
                f"loss or gradients were not finite for {progress.skipped_in_a_row} steps in a row, up to step {progress.step} "
                f"(max_skipped_steps is {limit}); lower the learning rate, use warmup_steps, or look at the data"
            )
        if progress.skipped_in_a_row == 1:
            self.parts.events.warn(f"from step {progress.step} on, steps were skipped: loss or gradients were not finite")

    def _validation_due(self, at_end: bool) -> bool:
        if not self.parts.validation:
            return False
        every = self.parts.args.validation_every_steps
        if at_end:
            return True
        best_is_asked_for = self.parts.args.keep_best > 0 and self.parts.args.best_metric.startswith("validation")
        if best_is_asked_for and self._save_due() is not None:
            return True
        return self.progress.step % every == 0 if every is not None else self._is_epoch_end()

    def _validate(self) -> bool:
        """Mean loss over the validation set, reported; returns whether the ranks agreed to stop instead."""
        parts, progress = self.parts, self.progress
        device = parts.world.device.torch_device
        sums, count = Sums(device, len(parts.objective.metric_names)), 0
        parts.model.module.eval()
        try:
            with torch.no_grad():
                parts.objective.before_step(parts.model, parts.validation)
                for batch in parts.validation:
                    self._beat("validate")
                    if parts.world.any(parts.stop.pending):
                        return True
                    micro = parts.objective(parts.model, batch.to(device))
                    sums.add(*micro)
                    count += parts.objective.count(batch)
        finally:
            parts.model.module.train()
        totals = sums.over_ranks(parts.world, parts.world.sum([count])[0])
        found = {"validation_loss": totals.loss, "validation_accuracy": totals.accuracy}
        if parts.objective.is_likelihood:
            found["validation_perplexity"] = _exp(totals.loss)
        values = {name: value for name, value in found.items() if math.isfinite(value)}
        self._metrics.update(values)
        parts.points.write(MetricsPoint(attempt=parts.attempt, step=progress.step, epoch=progress.epoch, time=time.time(), **values))
        parts.events.tell("validation", f"validation loss {totals.loss:.4f} after step {progress.step}", step=progress.step, **values)
        return False

    def _save_due(self) -> Trigger | None:
        args, progress = self.parts.args, self.progress
        if args.save_every_epoch and self._is_epoch_end():
            return "epoch"
        if args.save_samples and progress.samples_seen // args.save_samples > self._samples_before // args.save_samples:
            return "samples"
        return "steps" if args.save_every_steps and progress.step % args.save_every_steps == 0 else None

    def _saves_before_end(self) -> bool:
        args, loader = self.parts.args, self.parts.loader
        by_epoch = args.save_every_epoch and loader.steps_per_epoch < loader.total_steps
        return by_epoch or args.save_samples > 0 or 0 < args.save_every_steps < loader.total_steps

    def _is_epoch_end(self) -> bool:
        return self.progress.step % self.parts.loader.steps_per_epoch == 0

    def _tell_epoch(self) -> None:
        if self._is_epoch_end():
            number, step = self.progress.step // self.parts.loader.steps_per_epoch, self.progress.step
            means = self._means.take()
            loss = f": mean loss {means['loss']:.4f}" if "loss" in means else ""
            self.parts.events.tell("epoch", f"epoch {number} is done after step {step}{loss}", epoch=number, step=step, **means)

    def _save(self, trigger: Trigger, *, merge: bool = False, wait: bool = True) -> None:
        parts, progress = self.parts, self.progress
        self._saves.finish()
        self._beat("save")
        metrics = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        self._saves.add(parts.checkpoints.save(progress, trigger, metrics, merge=merge, wait=wait), progress.step, trigger)
        self._beat("train")

    def _stop(self) -> StopWant:
        self._saves.finish()
        want: StopWant = self.parts.world.broadcast(self.parts.stop.want())
        if want == "pause":
            self._save_unless_there("stop")
        return want

    def _save_unless_there(self, trigger: Trigger, *, merge: bool = False) -> None:
        self._saves.finish()
        newest = self.newest
        there = newest is not None and newest.step == self.progress.step
        if there and (not merge or any(file.path.startswith("merged/") for file in newest.files)):  # type: ignore[union-attr]
            return
        self._save(trigger, merge=merge)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
