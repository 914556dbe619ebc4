"""The checkpoints of one run as the loop sees them: go on from one, save one, and which of them stay."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from posttrain_trainer.checkpoint import state
from posttrain_trainer.checkpoint.background import Room, Saving, has_memory_for_copies
from posttrain_trainer.checkpoint.export import FromState, export_adapter, export_full, export_merged, gather
from posttrain_trainer.checkpoint.keep import to_delete
from posttrain_trainer.checkpoint.resume import choose, readable
from posttrain_trainer.checkpoint.save import Facts, Trigger, delete_checkpoint, sweep, write_checkpoint
from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.contract.errors import DiskFull, TrainerError
from posttrain_trainer.contract.events import Manifest
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.space import shortage
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.dist import World


class Exportable(Protocol):
    """What is needed of a loaded model."""

    @property
    def module(self) -> nn.Module:
        """The sharded root."""

    @property
    def hf_model(self) -> Any:
        """The transformers or peft model inside."""

    @property
    def tokenizer(self) -> Any:
        """With the chat template that was trained on."""

    @property
    def kind(self) -> Literal["full", "adapter"]:
        """What training changes."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the computation."""


@dataclass(frozen=True)
class Checkpoints:
    """Saves and restores one run.

    Attributes:
        run_dir: Where checkpoints are.
        attempt: Number of this attempt.
        args: The run's arguments.
        base: Folder or hub id of the base model, for adapters.
        world: All ranks.
        model: What is trained.
        optimizer: Its optimizer.
        warn: Told what the person who asked should know.
        room: For copies of what is saved beside training.
    """

    run_dir: RunDir
    attempt: int
    args: FullTrainingArguments
    base: str
    world: World
    model: Exportable
    optimizer: Optimizer
    warn: Callable[[str], None]
    room: Room = field(default_factory=Room)

    def prepare(self) -> None:
        """Make the folder and sweep it of what an interrupted attempt left.

        Raises:
            DiskFull: There is no room for even one checkpoint: nothing should be trained that can't be saved.
        """
        if self.world.rank == 0:
            self.run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
            sweep(self.run_dir)
        self.world.barrier()
        self._check_space(merge=False)
        if self.args.async_save != "off":
            _ = self._aside  # made by all ranks together

    @cached_property
    def _aside(self) -> tuple[World, ProcessGroup]:
        """For saving beside training: all ranks with a group of their own, and a group of rank 0."""
        return self.world.aside(), self.world.main_alone()

    def take_room(self) -> None:
        """Begin to take the memory for saving beside training; between steps, once the optimizer has its state."""
        if self._saves_aside():
            self.room.take(state.state_tensors(self.model.module, self.optimizer))

    def choose(self) -> Manifest | None:
        """The checkpoint to go on from by `args.resume`, verified; None = start anew. All ranks call it.

        Raises:
            CheckpointInvalid: The one named is not usable.
            InvalidArguments: The newest belongs to other arguments.
        """
        answer: dict[str, Any] = {}
        if self.world.rank == 0:
            try:
                choice = choose(self.run_dir, self.args.resume, self.args.digest())
                answer = {"manifest": choice.manifest and choice.manifest.model_dump(mode="json"), "passed_over": choice.passed_over}
            except TrainerError as error:
                answer = {"error": error.to_json()}
        answer = self.world.broadcast(answer)
        if "error" in answer:
            raise TrainerError.from_json(answer["error"])
        for sentence in answer["passed_over"]:
            self.warn(f"a checkpoint was passed over: {sentence}")
        return Manifest.model_validate(answer["manifest"]) if answer["manifest"] else None

    def load(self, manifest: Manifest) -> Progress:
        """Bring weights, optimizer and random generators to where a verified checkpoint was; all ranks call it.

        Raises:
            CheckpointInvalid: Its contents don't fit this model.
        """
        folder = self.run_dir.checkpoint(manifest.id) / "state"
        state.load_tensors(folder, self.model.module, self.optimizer)
        if not state.load_rng(folder, self.world.rank, self.world.device.kind):
            self.warn(f"{manifest.id} has no random state for rank {self.world.rank}; dropout, if any, goes on from another one")
        return state.load_progress(folder)

    def save(self, progress: Progress, trigger: Trigger, metrics: dict[str, float], *, merge: bool = False, wait: bool = True) -> Saving:
        """Begin to write a checkpoint; all ranks call it at the same step, when none is being written any more.

        Args:
            progress: How far the run is.
            trigger: Why it is saved.
            metrics: Measured at this very step.
            merge: Also write base and adapter as one model; only with `wait`.
            wait: Write it now. False = beside training, where arguments and memory allow.

        Returns:
            What is over when the checkpoint is complete, or could not be written (OSError); earlier ones are intact.

        Raises:
            DiskFull: It would leave less free space than must stay free; nothing was written.
        """
        started = time.perf_counter()
        self._check_space(merge=merge)
        facts = Facts(
            step=progress.step,
            epoch=progress.epoch,
            samples_seen=progress.samples_seen,
            tokens_seen=progress.tokens_seen,
            attempt=self.attempt,
            kind=self.model.kind,
            trigger=trigger,
            metrics=dict(metrics),
            arguments_digest=self.args.digest(),
        )
        wait = wait or merge or not self._saves_aside()
        fill = self._fill_now(progress, merge=merge) if wait else self._fill_aside(progress)
        world = self.world if wait else self._aside[0]
        return Saving(lambda: self._write(world, facts, fill), wait=wait, started=started)

    def _write(self, world: World, facts: Facts, fill: Callable[[Path], None]) -> Manifest:
        manifest = write_checkpoint(self.run_dir, world, facts, fill)
        if world.rank == 0:
            self._prune()
        return manifest

    def _saves_aside(self) -> bool:
        """Whether to save beside training: the same on every rank."""
        if self.args.async_save != "auto":
            return self.args.async_save == "on"
        tensors = state.state_tensors(self.model.module, self.optimizer)
        return not self.world.any(not (self.room.taken or has_memory_for_copies(tensors, self.world.local_world_size)))

    def _check_space(self, *, merge: bool) -> None:
        """Refuse on all ranks together, and before anything is written, what the disk has no room for."""
        said = shortage(self.run_dir.checkpoints, self.size_bytes(merge=merge)) if self.world.rank == 0 else None
        if (sentence := self.world.broadcast(said)) is not None:
            raise DiskFull(sentence, rank=self.world.rank)

    def size_bytes(self, *, merge: bool) -> int:
        """About how many bytes the next checkpoint has: tensors to the byte, the tokenizer and other small files not.

        Args:
            merge: Whether base and adapter are also written as one model.
        """
        model = self.model
        whole = sum(parameter.numel() for parameter in model.module.parameters()) * model.dtype.itemsize
        trained = sum(p.numel() * p.element_size() for p in model.module.parameters() if p.requires_grad)
        export = whole if model.kind == "full" else trained + (whole if merge else 0)
        return state.tensor_bytes(model.module, self.optimizer) + export

    def _fill_now(self, progress: Progress, *, merge: bool) -> Callable[[Path], None]:
        """What writes the files from the tensors themselves, while nothing trains."""
        model = self.model
        tensors = state.state_tensors(model.module, self.optimizer)
        finish = self._finish(progress, merge=merge)

        def fill(folder: Path) -> None:
            state.save_tensors(folder / "state", tensors)
            finish(folder, gather(self.world, model.module, model.hf_model, dtype=self._written, trained_only=model.kind == "adapter"))

        return fill

    def _fill_aside(self, progress: Progress) -> Callable[[Path], None]:
        """What writes the files from copies that are made here and now."""
        model, (aside, main) = self.model, self._aside
        source = FromState(self.world, model.module, model.hf_model, dtype=self._written, trained_only=model.kind == "adapter")
        copies = self.room.copied(state.state_tensors(model.module, self.optimizer))
        finish = self._finish(progress, merge=False)

        def fill(folder: Path) -> None:
            state.save_tensors(folder / "state", copies, aside.group)
            finish(folder, source.read(copies, folder / "state", main) if aside.rank == 0 else {})

        return fill

    @property
    def _written(self) -> torch.dtype | None:
        """Precision of the exported weights; None = as they are."""
        return self.model.dtype if self.model.kind == "full" else None

    def _finish(self, progress: Progress, *, merge: bool) -> Callable[[Path, dict[str, Tensor]], None]:
        """What writes everything but the state's tensors, as it is at this moment; the weights are rank 0's."""
        rank, model = self.world.rank, self.model
        rng, progress = state.rng_states(self.world.device.kind), copy.deepcopy(progress)

        def finish(folder: Path, weights: dict[str, Tensor]) -> None:
            state.save_rng(folder / "state", rank, rng)
            if rank != 0:
                return
            state.save_progress(folder / "state", progress)
            if model.kind == "full":
                export_full(folder / "model", model.hf_model, weights, tokenizer=model.tokenizer, dtype=model.dtype)
                return
            export_adapter(folder / "model", model.hf_model, weights, base=self.base, tokenizer=model.tokenizer)
            if merge:
                export_merged(folder / "merged", folder / "model", self.base, tokenizer=model.tokenizer, dtype=model.dtype)

        return finish

    def _prune(self) -> None:
        manifests, _ = readable(self.run_dir)
        args = self.args
        for name in to_delete(manifests, keep_last=args.keep_last, keep_best=args.keep_best, best_metric=args.best_metric):
            try:
                delete_checkpoint(self.run_dir, name)
            except OSError as error:
                self.warn(f"checkpoint {name} should have been removed by keep_last but could not be: {error}")
