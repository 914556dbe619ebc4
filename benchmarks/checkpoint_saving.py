"""How long training stands still for a checkpoint: written at once, and beside training; and what that costs the steps.

    python benchmarks/checkpoint_saving.py --model FOLDER [--rounds 3] [--lora RANK] [--folder DISK]

FOLDER is a model in Hugging Face layout. In one process, in turn: some steps alone; a checkpoint written at once; one
written beside steps. Printed: the seconds of each, the share of a synchronous save's time for which training stands still
in the other (median and spread over the rounds, of pairs), and how much slower steps are while one is written. The first
save of a process also takes the memory for the copy, which a run does beside its first steps; here it is waited for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy
import torch

from posttrain_trainer import logs
from posttrain_trainer.checkpoint.background import Saving
from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.checkpoint.store import Checkpoints
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.spec import FullTrainingArguments, LoraArguments
from posttrain_trainer.data.batch import collate
from posttrain_trainer.device import Device
from posttrain_trainer.dist import RankFacts, World
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models.load import LoadedModel, load_model
from posttrain_trainer.optim.groups import build_optimizer


class Bench:
    """A model that trains on made-up tokens, and its checkpoints."""

    def __init__(self, options: argparse.Namespace, folder: Path, world: World) -> None:
        lora = LoraArguments(rank=options.lora) if options.lora else None
        args = FullTrainingArguments(
            model_path=str(options.model), data_path="none", ckpt_output_dir=str(folder), lora=lora, async_save="on", keep_last=1
        )
        self.model: LoadedModel = load_model(args, world.device, world)
        self.optimizer = build_optimizer(args, self.model.module)
        self.checkpoints = Checkpoints(RunDir(folder), 1, args, str(options.model), world, self.model, self.optimizer, print)
        self.checkpoints.prepare()
        ids = numpy.arange(5, 5 + options.tokens, dtype=numpy.int32)
        self.batch = collate([(ids, ids)], packed=True, pad_id=2)
        self.progress = Progress()

    def step(self) -> float:
        """One optimizer step; its seconds."""
        started = time.perf_counter()
        loss = self.model.module(self.batch, cross_entropy)
        (loss.loss_sum / self.batch.num_supervised).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        return time.perf_counter() - started

    def save(self, *, wait: bool) -> Saving:
        """Begin a checkpoint of this step."""
        return self.checkpoints.save(self.progress, "steps", {}, wait=wait)


def main() -> None:
    """Measure and print."""
    options = arguments()
    logs.quiet_progress_bars()
    device = Device.pick(options.device)
    device.activate()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, World.open(device, facts=RankFacts()) as world:
        bench = Bench(options, Path(folder), world)
        bench.step()
        bench.checkpoints.take_room()
        size = bench.checkpoints.size_bytes(merge=False)
        print(f"{bench.model.num_parameters:,} parameters, checkpoints of {size / 1e9:.2f} GB, {torch.get_num_threads()} threads\n")
        bench.save(wait=False).result()  # takes the room, and warms the disk
        shares, slower = [], []
        for number in range(options.rounds):
            share, slow = pair(bench, number + 1)
            shares.append(share)
            slower.append(slow)
        print(f"\ntraining stands still for {spread(shares, '.1%')} of the time of a synchronous save")
        print(f"steps take {spread(slower, '.2f')} times as long while one is written")


def pair(bench: Bench, number: int) -> tuple[float, float]:
    """One save of each kind: the share that is blocked, and the factor of slow-down of the steps beside it."""
    alone = statistics.median(bench.step() for _ in range(3))
    at_once = bench.save(wait=True)
    at_once.result()
    bench.step()
    aside, steps = bench.save(wait=False), []
    while not aside.over:
        steps.append(bench.step())
    aside.result()
    busy = statistics.median(steps)
    print(
        f"round {number}: at once {at_once.seconds:.2f} s; beside training {aside.blocked_s:.2f} s blocked of {aside.seconds:.2f} s; "
        f"step {alone:.2f} s alone, {busy:.2f} s beside ({len(steps)} of them)",
        flush=True,
    )
    return aside.blocked_s / at_once.seconds, busy / alone


def spread(values: list[float], form: str) -> str:
    """Median with least and most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank instead of all weights")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; the system's temporary folder if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
