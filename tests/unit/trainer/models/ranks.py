"""What each rank of test_ranks.py does; started as a script, prints one JSON object per rank.

Documents are dealt to the ranks, so that the sum over ranks is that of one rank with all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy
import torch

from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.checkpoint.store import Checkpoints
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.batch import collate
from posttrain_trainer.device import Device
from posttrain_trainer.dist import World
from posttrain_trainer.failures import as_trainer_error
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models.load import load_model
from posttrain_trainer.optim.groups import build_optimizer
from posttrain_trainer.testing import whole

LENGTHS = (40, 9, 31, 5, 17)


def samples():
    generator = numpy.random.default_rng(5)
    made = []
    for length in LENGTHS:
        ids = generator.integers(4, 400, length, dtype=numpy.int32)
        labels = numpy.append(ids[1:], -100).astype(numpy.int32)
        labels[: length // 2] = -100
        made.append((ids, labels))
    return made


def train(args, device, world, steps=10):
    model = load_model(args, device, world)
    optimizer = build_optimizer(args, model.module)
    mine = samples()[world.rank :: world.world_size]
    # Two micro-batches each; the second rank's last one may be empty, which must not hang the first.
    micro = [collate(mine[:2], packed=True, pad_id=2), collate(mine[2:], packed=True, pad_id=2)]
    supervised = world.sum([sum(batch.num_supervised for batch in micro)])[0]
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number, batch in enumerate(micro):
            model.set_sync(number == len(micro) - 1)
            result = model.module(batch, cross_entropy)
            (result.loss_sum * world.world_size / supervised).backward()
            total += result.loss_sum.item()
        norm = torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        norms.append(whole(norm).item())
        optimizer.step()
        losses.append(world.sum([total])[0] / supervised)
    return {"losses": losses, "norms": norms, "local": sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.module.parameters())}


def together(world, rank):
    """What a rank hears when only the last one has no room: [what an act that works gave, the error's code and rank]."""

    def act():
        if rank == world.world_size - 1:
            raise OSError(28, "No space left on device")

    try:
        world.together(act)
    except Exception as error:
        told, kind = as_trainer_error(error, rank=rank), type(error).__name__
    return [world.together(lambda: rank), told.code, told.rank, kind]


def save_filled(args, folder, device, world):
    """Save adapters whose shards say whose they are, at once and beside training; returns this rank's rows by name."""
    model = load_model(args, device, world)
    optimizer = build_optimizer(args, model.module)
    rows = {}
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                local = parameter.to_local()
                local.copy_(torch.arange(local.numel()).view(local.shape) + 100_000 * (world.rank + 1))
                rows[name] = len(local)
    for name, wait in (("at-once", True), ("beside", False)):
        checkpoints = Checkpoints(RunDir(Path(folder) / name), 1, args, "base", world, model, optimizer, print)
        checkpoints.prepare()
        checkpoints.save(Progress(step=1), "steps", {}, wait=wait).result()
    return rows


def main(model_path, variants, folder=None):
    torch.set_num_threads(1)
    device = Device.pick("cpu")
    with World.open(device) as world:
        facts = {
            "sum": world.sum([world.rank + 0.5, 1.0]),
            "any": [world.any(world.rank == 1), world.any(False)],
            "broadcast": world.broadcast({"from": world.rank}),
            "together": [together(one, world.rank) for one in (world, world.aside())],
        }
        base = {"model_path": model_path, "data_path": "d", "ckpt_output_dir": "o", "dtype": "fp32", "learning_rate": 5e-3}
        runs = {name: train(FullTrainingArguments(**base, **changes), device, world) for name, changes in variants.items()}
        if folder is not None:
            facts["rows"] = save_filled(FullTrainingArguments(**base, lora={"rank": 4}, async_save="on"), folder, device, world)
    print(json.dumps({"facts": facts, "runs": runs}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:])
