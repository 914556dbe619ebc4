"""The reference's log-probabilities of all pairs: computed once, before training, and kept on disk by content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from posttrain_trainer.contract.rundir import sync_folder
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.batch import collate
from posttrain_trainer.data.groups import Groups
from posttrain_trainer.data.pack import plan_packed, plan_padded
from posttrain_trainer.dist import World
from posttrain_trainer.models.fingerprint import weights_fingerprint
from posttrain_trainer.models.load import LoadedModel
from posttrain_trainer.objectives.dpo import log_probabilities


@dataclass(frozen=True)
class Reference:
    """Gives pairs their reference; all ranks call it together, before any weight was trained or resumed.

    Args:
        args: Say what the log-probabilities depend on.
        model: As it is before training.
        world: The ranks, which share the work.
        max_batch_len: Most tokens of a micro-batch.
        folder: Where results are kept, one file for each content.
        tell: Called with a sentence when there is something to compute.
        beat: Called after each micro-batch.
    """

    args: FullTrainingArguments
    model: LoadedModel
    world: World
    max_batch_len: int
    folder: Path
    tell: Callable[[str], None]
    beat: Callable[[], None]

    def add(self, pairs: Groups) -> Groups:
        """The same pairs with the log-probabilities of both answers, summed over their tokens."""
        path = Path(self.world.broadcast(str(self._path(pairs)) if self.world.is_main else None))
        found = self._read(path, len(pairs)) if self.world.is_main else None
        if not self.world.any(found is not None):
            if self.world.is_main:
                self.tell(f"computing the reference's log-probabilities of {len(pairs)} pairs")
            values = self._compute(pairs)
            if self.world.is_main:
                _write(path, values)
        elif found is not None:
            values = found
        else:
            values = np.load(path, allow_pickle=False)
        return pairs.with_reference(values)

    def _path(self, pairs: Groups) -> Path:
        args, lora = self.args, self.args.lora
        parts = [
            1, pairs.key, weights_fingerprint(args.model_path), str(self.model.dtype), args.master_weights,
            None if args.qat is None else args.qat.model_dump(), lora is not None and lora.quantize_base,
        ]  # fmt: skip
        return self.folder / f"reference-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.npy"

    @staticmethod
    def _read(path: Path, count: int) -> npt.NDArray[np.float32] | None:
        """What is on disk, if it is whole."""
        try:
            values: npt.NDArray[np.float32] = np.load(path, allow_pickle=False)
        except (FileNotFoundError, ValueError, EOFError):
            return None
        return values if values.shape == (count, 2) and values.dtype == np.float32 else None

    def _compute(self, pairs: Groups) -> npt.NDArray[np.float32]:
        packed, pad_id = self.args.is_padding_free, self.model.tokenizer.pad_token_id
        lengths = pairs.lengths if packed else pairs.padded_lengths
        plan = (plan_packed if packed else plan_padded)(lengths, self.max_batch_len, self.world.world_size)
        values = np.zeros((len(pairs), 2))
        self.model.module.eval()
        with torch.no_grad(), self.model.without_adapter():
            for numbers in plan[self.world.rank]:
                batch = collate([pairs.sample(int(number)) for number in numbers], packed=packed, pad_id=pad_id)
                logprobs_D = log_probabilities(self.model, batch.to(self.world.device.torch_device))
                values[numbers] = logprobs_D[: 2 * len(numbers)].view(-1, 2).cpu().numpy()
                self.beat()
        self.model.module.train()
        self.model.free_gathered()
        return np.asarray(self.world.sum(values.ravel().tolist()), dtype=np.float32).reshape(-1, 2)


def _write(path: Path, values: npt.NDArray[np.float32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.save(file, values, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
