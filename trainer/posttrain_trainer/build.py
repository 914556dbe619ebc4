"""The composition root: an attempt's arguments -> a run, from loading to its result. The one place that knows every part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from posttrain_trainer import logs
from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.checkpoint.store import Checkpoints
from posttrain_trainer.contract.errors import CheckpointInvalid
from posttrain_trainer.contract.events import Manifest, RunResult, StopWant
from posttrain_trainer.contract.methods import DpoMethod
from posttrain_trainer.contract.rundir import AttemptDir, RunDir
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.batch import Batch
from posttrain_trainer.data.groups import Groups
from posttrain_trainer.data.loader import StepLoader, validation_batches
from posttrain_trainer.data.prepare import Prepared, prepare_dataset
from posttrain_trainer.device import Device
from posttrain_trainer.dist import RankFacts, World
from posttrain_trainer.loop import Loop, Parts
from posttrain_trainer.metrics.choose import open_sinks
from posttrain_trainer.metrics.heartbeat import Heart
from posttrain_trainer.metrics.jsonl import EventLog
from posttrain_trainer.metrics.mfu import Mfu, flops_per_token, peak_of
from posttrain_trainer.metrics.profile import ProfileWindow
from posttrain_trainer.metrics.sink import End, FanOut
from posttrain_trainer.models.load import LoadedModel, load_model, load_tokenizer, sequence_limits
from posttrain_trainer.models.source import find_model
from posttrain_trainer.objectives.base import Objective
from posttrain_trainer.objectives.dpo import Dpo
from posttrain_trainer.objectives.reference import Reference
from posttrain_trainer.objectives.sft import Sft
from posttrain_trainer.optim.groups import build_optimizer
from posttrain_trainer.signals import StopRequests

T = TypeVar("T")


class Startup:
    """Seconds of each part of a start."""

    def __init__(self, import_s: float) -> None:
        self.seconds = {"import": import_s}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """Note the time since the last lap under `name`, the first time it is called with it."""
        now = time.perf_counter()
        self.seconds.setdefault(name, round(now - self._since, 3))
        self._since = now


def run(attempt: AttemptDir, args: FullTrainingArguments, *, heart: Heart, stop: StopRequests, import_s: float) -> RunResult:
    """Do what one rank does from loaded packages to the end of training; all ranks call it.

    Args:
        attempt: The attempt's folder.
        args: What to train.
        heart: Told about progress.
        stop: Asked for stop requests.
        import_s: Seconds that this process took to get here.

    Returns:
        How the run ended; the same on every rank but for the warnings, which rank 0 knows all of.

    Raises:
        TrainerError: What the run failed of, in the contract's words; other exceptions as torch and the system raise them.
    """
    args = args.resolved()
    facts = RankFacts.from_environment()
    logs.set_up(args.log_level, rank=facts.rank)
    logs.quiet_progress_bars()
    device = Device.pick(args.device, local_rank=facts.local_rank)
    device.activate(facts.local_world_size)
    device.seed(args.random_seed + facts.rank, deterministic=args.deterministic)
    events = EventLog(attempt.events if facts.rank == 0 else None, attempt.number)
    try:
        with World.open(device, facts=facts) as world:
            return _Run(attempt, args, world, events, heart, stop, Startup(import_s)).train()
    finally:
        events.close()


class _Run:
    """What the steps of `run` share."""

    def __init__(
        self,
        attempt: AttemptDir,
        args: FullTrainingArguments,
        world: World,
        events: EventLog,
        heart: Heart,
        stop: StopRequests,
        startup: Startup,
    ) -> None:
        self.attempt = attempt
        self.args = args
        self.world = world
        self.events = events
        self.heart = heart
        self.stop = stop
        self.startup = startup
        self.run_dir = RunDir(attempt.path.parent.parent)

    def train(self) -> RunResult:
        """Load, prepare, resume, train, and tell how it ended."""
        warn = self.events.warn
        points = FanOut(open_sinks(self.args, self.attempt, warn) if self.world.is_main else (), warn)
        for tracker in points.trackers:
            self.events.tell("tracker", f"{tracker.kind} shows this attempt at {tracker.url}", **tracker.model_dump())
        self.heart.show(points.trackers)
        profile = self._profile()
        end: End = "failed"
        try:
            self._enter_load()
            model = load_model(self.args, self.world.device, self.world, tokenizer=load_tokenizer(self.args))
            for note in model.notes:
                self.events.tell("phase", note, phase="load")
            for warning in model.warnings:
                self.events.warn(warning)
            self.startup.lap("load")
            dataset, loader, validation = self._data(model)
            self.startup.lap("data")
            checkpoints = self._checkpoints(model)
            progress, manifest = self._resume(checkpoints, dataset, loader)
            parts = replace(self._parts(model, loader, validation, checkpoints, points), mfu=self._mfu(model), around_step=profile.step)
            self._tell_plan(model, dataset, loader)
            started = time.perf_counter()
            loop = Loop(parts, progress, manifest)
            want = loop.run()
            profile.close(progress.step)
            self.heart.flush()
            seconds = time.perf_counter() - started
            end = "completed" if want is None else "stopped"
            points.close(end)  # before the result, whose warnings tell of a tracker that failed at its end
            return self._result(loop, want, dataset, seconds)
        finally:
            points.close(end)

    def _profile(self) -> ProfileWindow:
        rank, events = self.world.rank, self.events
        return ProfileWindow(
            self.args.profile_steps, self.attempt.profile(rank), self.world.device,
            tell=lambda text, path: events.tell("phase", text, phase="train", path=str(path)), warn=events.warn,
        )  # fmt: skip

    def _mfu(self, model: LoadedModel) -> Mfu | None:
        """Rank 0, which writes the points, measures: it takes some hundredths of a second."""
        if not self.world.is_main:
            return None
        table: Any = model.hf_model.get_input_embeddings()
        looked_up = 0 if getattr(model.config, "tie_word_embeddings", False) else table.weight.numel()
        peak = peak_of(self.world.device, model.dtype)
        self.events.tell(
            "phase", f"mfu counts against {peak.flops_per_s / 1e12:.3g} TFLOP/s a rank ({peak.source})",
            phase="load", peak_flops_per_s=peak.flops_per_s,
        )  # fmt: skip
        return Mfu(flops_per_token(model.num_parameters, model.num_trainable, looked_up), peak, self.world.world_size)

    def _enter_load(self) -> None:
        self.heart.beat("load")
        self.events.tell("phase", f"loading {self.args.model_path}", phase="load")

    def _data(self, model: LoadedModel) -> tuple[Prepared, StepLoader, Sequence[Batch]]:
        """Training loader and validation batches; rank 0 prepares, the others find what it wrote."""
        args, world = self.args, self.world
        self.heart.beat("data")
        self.events.tell("phase", f"preparing {args.data_path}", phase="data")
        max_seq_len, max_batch_len = sequence_limits(args, model.max_positions)
        training, held_out = self._prepared(args.data_path, model, max_seq_len, max_batch_len), None
        report = training
        if args.validation_data_path is not None:
            held_out = self._prepared(args.validation_data_path, model, max_seq_len, max_batch_len)
        elif args.validation_split is not None:
            training, held_out = training.split(args.validation_split, args.random_seed)
        self.events.tell("data", f"{len(training)} samples to train on", **report.report)
        for warning in report.report.get("warnings", []):
            self.events.warn(warning)
        loader = StepLoader(
            training,
            effective_batch_size=args.effective_batch_size,
            max_batch_len=max_batch_len,
            rank=world.rank,
            world_size=world.world_size,
            seed=args.random_seed,
            shuffle=args.shuffle,
            num_epochs=args.num_epochs,
            packed=args.is_padding_free,
            pad_id=model.tokenizer.pad_token_id,
            max_steps_per_epoch=args.max_steps_per_epoch,
            max_steps=args.max_steps,
        )
        validation: Sequence[Batch] = ()
        if held_out is not None:
            validation = validation_batches(
                held_out,
                max_batch_len=max_batch_len,
                rank=world.rank,
                world_size=world.world_size,
                packed=args.is_padding_free,
                pad_id=model.tokenizer.pad_token_id,
                max_batches=args.max_validation_steps,
            )
        return report, loader, validation

    def _prepared(self, path: str, model: LoadedModel, max_seq_len: int, max_batch_len: int) -> Prepared:
        assert self.args.data_output_dir is not None  # resolved() fills it in
        cache_dir = Path(self.args.data_output_dir)

        def prepare() -> Prepared:
            return prepare_dataset(
                path, tokenizer=model.tokenizer, args=self.args, max_seq_len=max_seq_len, cache_dir=cache_dir,
                progress=lambda _: self.heart.beat("data"),
            )  # fmt: skip

        found = _main_first(self.world, prepare)
        method = self.args.method
        if not isinstance(method, DpoMethod) or method.reference_free or not method.precompute_reference:
            return found
        assert isinstance(found, Groups)  # pairs, as the method's rows are
        reference = Reference(
            self.args, model, self.world, max_batch_len, cache_dir,
            tell=lambda text: self.events.tell("phase", text, phase="data"), beat=lambda: self.heart.beat("data"),
        )  # fmt: skip
        return reference.add(found)

    def _checkpoints(self, model: LoadedModel) -> Checkpoints:
        optimizer = build_optimizer(self.args, model.module)
        base = find_model(self.args.model_path).name
        checkpoints = Checkpoints(
            run_dir=self.run_dir,
            attempt=self.attempt.number,
            args=self.args,
            base=base,
            world=self.world,
            model=model,
            optimizer=optimizer,
            warn=self.events.warn,
        )
        checkpoints.prepare()
        return checkpoints

    def _resume(self, checkpoints: Checkpoints, dataset: Prepared, loader: StepLoader) -> tuple[Progress, Manifest | None]:
        size = {"samples": len(dataset), "tokens": int(dataset.lengths.sum(dtype="int64"))}
        manifest = checkpoints.choose()
        if manifest is None:
            return Progress(data=size), None
        progress = checkpoints.load(manifest)
        if progress.data != size:
            raise CheckpointInvalid(
                f"{manifest.id} was made with other data ({progress.data}, now {size}); its position in the data means nothing "
                "here. Bring the data back, or start anew with resume: never"
            )
        loader.load_state_dict(progress.loader)
        self.events.tell("resume", f"going on from {manifest.id}", id=manifest.id, step=manifest.step)
        return progress, manifest

    def _parts(self, model: LoadedModel, loader: StepLoader, validation: Sequence[Batch], checkpoints: Checkpoints, points: FanOut) -> Parts:
        return Parts(
            args=self.args,
            attempt=self.attempt.number,
            world=self.world,
            model=model,
            objective=self._objective(),
            optimizer=checkpoints.optimizer,
            loader=loader,
            validation=validation,
            checkpoints=checkpoints,
            points=points,
            events=self.events,
            heart=self.heart,
            stop=self.stop,
            first_step_done=self._first_step_done,
        )

    def _objective(self) -> Objective:
        method = self.args.method
        return Dpo(method, self.world) if isinstance(method, DpoMethod) else Sft()

    def _tell_plan(self, model: LoadedModel, dataset: Prepared, loader: StepLoader) -> None:
        device = self.world.device
        self.events.tell(
            "phase",
            f"training {model.num_trainable:,} of {model.num_parameters:,} parameters for {loader.total_steps} steps "
            f"on {self.world.world_size} {device.kind} rank(s) in {str(model.dtype).removeprefix('torch.')}",
            phase="train",
            total_steps=loader.total_steps,
            steps_per_epoch=loader.steps_per_epoch,
            samples=len(dataset),
            parameters=model.num_parameters,
            trainable=model.num_trainable,
            dtype=str(model.dtype).removeprefix("torch."),
            device=device.kind,
            ranks=self.world.world_size,
        )
        self.startup.lap("resume")

    def _first_step_done(self) -> None:
        """Called after every step; the first time it tells what the start cost."""
        if "first_step" in self.startup.seconds:
            return
        self.startup.lap("first_step")
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.startup.seconds.items())
        self.events.tell("phase", f"the first step is done; seconds of the start: {parts}", phase="train", startup_s=self.startup.seconds)

    def _result(self, loop: Loop, want: StopWant | None, dataset: Prepared, train_time_s: float) -> RunResult:
        progress, newest = loop.progress, loop.newest
        self.events.tell("ended", "every planned step is done" if want is None else f"stopped as asked ({want})", step=progress.step)
        return RunResult(
            status="completed" if want is None else "stopped",
            want=want,
            steps=progress.step,
            total_steps=loop.parts.loader.total_steps,
            epochs=progress.epoch,
            samples_seen=progress.samples_seen,
            tokens_seen=progress.tokens_seen,
            skipped_steps=progress.skipped_steps,
            loss=progress.loss,
            checkpoint=newest.id if newest is not None else None,
            checkpoint_path=str(self.run_dir.checkpoint(newest.id)) if newest is not None else None,
            train_time_s=train_time_s,
            startup_s=self.startup.seconds,
            dataset=dataset.report,
            warnings=self.events.warnings,
        )


def _main_first(world: World, act: Callable[[], T]) -> T:
    """Let rank 0 do what leaves something behind, then the others, who find it."""
    result = act() if world.is_main else None
    world.barrier()
    return result if result is not None else act()
