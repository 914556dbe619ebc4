"""The checkpoints of one run as the loop sees them: go on from one, save one, and which of them stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from posttrain_trainer.checkpoint import state
from posttrain_trainer.checkpoint.export import export_adapter, export_full, export_merged
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
    """

    run_dir: RunDir
    attempt: int
    args: FullTrainingArguments
    base: str
    world: World
    model: Exportable
    optimizer: Optimizer
    warn: Callable[[str], None]

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

    def save(self, progress: Progress, trigger: Trigger, metrics: dict[str, float], *, merge: bool) -> Manifest:
        """Write a checkpoint; all ranks call it at the same step.

        Args:
            progress: How far the run is.
            trigger: Why it is saved.
            metrics: Measured at this very step.
            merge: Also write base and adapter as one model.

        Raises:
            OSError: It could not be written; earlier ones are intact.
            DiskFull: It would leave less free space than must stay free; nothing was written.
        """
        self._check_space(merge=merge)
        facts = Facts(
            step=progress.step,
            epoch=progress.epoch,
            samples_seen=progress.samples_seen,
            tokens_seen=progress.tokens_seen,
            attempt=self.attempt,
            kind=self.model.kind,
            trigger=trigger,
            metrics=metrics,
            arguments_digest=self.args.digest(),
        )
        manifest = write_checkpoint(self.run_dir, self.world, facts, lambda folder: self._fill(folder, progress, merge=merge))
        if self.world.rank == 0:
            self._prune()
        return manifest

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

    def _fill(self, folder: Path, progress: Progress, *, merge: bool) -> None:
        rank, model = self.world.rank, self.model
        state.save_tensors(folder / "state", model.module, self.optimizer)
        state.save_rng(folder / "state", rank, self.world.device.kind)
        if rank == 0:
            state.save_progress(folder / "state", progress)
        if model.kind == "full":
            export_full(folder / "model", self.world, model.module, model.hf_model, tokenizer=model.tokenizer, dtype=model.dtype)
            return
        export_adapter(folder / "model", self.world, model.module, model.hf_model, base=self.base, tokenizer=model.tokenizer)
        if merge and rank == 0:
            export_merged(folder / "merged", folder / "model", self.base, tokenizer=model.tokenizer, dtype=model.dtype)

    def _prune(self) -> None:
        manifests, _ = readable(self.run_dir)
        args = self.args
        for name in to_delete(manifests, keep_last=args.keep_last, keep_best=args.keep_best, best_metric=args.best_metric):
            try:
                delete_checkpoint(self.run_dir, name)
            except OSError as error:
                self.warn(f"checkpoint {name} should have been removed by keep_last but could not be: {error}")
