"""What each rank of test_slices.py does: loads by its own rows, then whole, trains each a little, tells losses and peaks."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from ranks import train

from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.device import Device
from posttrain_trainer.dist import World
from posttrain_trainer.models import load


def peak_growth(act):
    """Most memory that `act` had at any moment beyond what was there before it, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    act()
    return memory("VmHWM") - before


def memory(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def main(big, uneven):
    torch.set_num_threads(1)
    device = Device.pick("cpu")
    sliced = load.empty_model
    found = {"losses": {}, "peaks": {}}
    base = {"data_path": "d", "ckpt_output_dir": "o", "dtype": "fp32", "learning_rate": 5e-3}
    with World.open(device) as world:
        load.load_model(FullTrainingArguments(model_path=uneven, **base), device, world)  # what is imported and set up once
        for way, make in (("slices", sliced), ("whole", lambda *_: None)):
            load.empty_model = make
            big_args = FullTrainingArguments(model_path=big, **base)
            found["peaks"][way] = peak_growth(lambda args=big_args: load.load_model(args, device, world))
            for name, changes in (("full", {}), ("dora", {"lora": {"rank": 4, "use_dora": True}}), ("none", {"fsdp": {"sharding": "none"}})):
                args = FullTrainingArguments(model_path=uneven, **base, **changes)
                found["losses"][f"{name} {way}"] = train(args, device, world, steps=3)["losses"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
