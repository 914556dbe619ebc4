"""Real tokens per second of this trainer beside TRL's SFTTrainer, on the same model, rows, numerics and threads.

    python benchmarks/trainer_throughput.py --model FOLDER --data rows.jsonl --trl-python /venv/with/trl/bin/python

FOLDER is a model in Hugging Face layout; rows are `{"messages": [...]}` whose last message is the assistant's. All of
them run in processes of their own, one after the other, `--rounds` times in turn, so that a machine that grows slower
meets all alike. Steps hold about `--tokens` real tokens each; the first is left out. Loss is on the last answer alone in
both. Printed: each one's median and spread, its memory, the share of this machine's measured matmul peak (6 operations per
parameter and token, 4 with an adapter), and our ratio to the others within the same round, the only figure that can be compared between machines.

TRL has an environment of its own: `python -m venv E && E/bin/pip install trl==1.16.0 peft` beside the same torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = ("ours", "trl-packed", "trl-padded")
NUMERICS = {"fp32": "all in fp32", "bf16": "pure bf16", "mixed": "bf16 computation, fp32 weights (TRL: autocast)"}


def main() -> None:
    """Run the sides in turn and print the table."""
    options = arguments()
    if options.side:
        print(json.dumps(SIDE[options.side](options)))
        return
    peak = matmul_peak(options.threads, "float32" if options.numerics == "fp32" else "bfloat16")
    print(f"{NUMERICS[options.numerics]}, LoRA rank {options.lora}" if options.lora else NUMERICS[options.numerics], flush=True)
    print(f"matmul peak {peak / 1e9:.0f} GFLOP/s on {options.threads} threads\n", flush=True)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES:
            found[side].append(run(side, options))
            print(f"round {number + 1}: {side}: {json.dumps(found[side][-1])}", flush=True)
    table(found, peak, (4 if options.lora else 6) * parameters(options.model))


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--numerics", choices=NUMERICS, default="fp32")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank instead of all weights")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """One side in a process of its own: tokens per second of each counted step, losses, peak memory in bytes."""
    # Not resolved: an interpreter of a virtual environment is a link, and is that environment by its own path.
    python = sys.executable if side == "ours" else str(Path(options.trl_python).absolute())
    given = {"model": options.model.resolve(), "data": options.data.resolve(), "side": side}
    given |= {name: getattr(options, name) for name in ("numerics", "lora", "tokens", "steps", "threads")}
    argv = [python, "-W", "ignore", str(Path(__file__).resolve()), *(f"--{name}={value}" for name, value in given.items())]
    env = os.environ | {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if len(result["tokens"]) != options.steps:
        raise SystemExit(f"{side} made {len(result['tokens'])} steps instead of {options.steps}")
    return result


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Our trainer on one rank, as `train_torchrun` starts it."""
    from posttrain_trainer import FullTrainingArguments, TorchrunArguments, train_torchrun

    numerics = {"fp32": {"dtype": "fp32"}, "bf16": {"dtype": "bf16", "master_weights": False}, "mixed": {"dtype": "bf16"}}
    args = FullTrainingArguments(
        model_path=str(options.model), data_path=str(options.data), ckpt_output_dir=str(Path.cwd() / "run"), max_steps=options.steps,
        effective_batch_size=rows_per_step(options), max_seq_len=options.tokens, max_batch_len=options.tokens, save_every_epoch=False,
        learning_rate=1e-5, lr_scheduler="constant", shuffle=False, num_epochs=1000, lora={"rank": options.lora} if options.lora else None, **numerics[options.numerics],
    )  # fmt: skip
    train_torchrun(TorchrunArguments(nproc_per_node=1), args)
    [metrics] = (Path.cwd() / "run").rglob("metrics.jsonl")
    points = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "tokens_per_s": [round(point["tokens_per_s"], 1) for point in points[1:]],
        "tokens": [point["tokens"] for point in points],
        "losses": [round(point["loss"], 4) for point in points],
        "peak_bytes": max(point["memory_bytes"] for point in points),
    }


def trl(options: argparse.Namespace, *, packed: bool) -> dict[str, Any]:
    """TRL's SFTTrainer on rows of prompt and completion; a step is timed from its batch to the changed weights."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(options.threads)
    rows = [json.loads(line)["messages"] for line in options.data.read_text().splitlines()]
    data = Dataset.from_list([{"prompt": messages[:-1], "completion": messages[-1:]} for messages in rows])
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16 if options.numerics == "bf16" else torch.float32)
    config = SFTConfig(
        output_dir=str(Path.cwd() / "trl"), use_cpu=True, bf16=options.numerics == "mixed", packing=packed, max_length=options.tokens,
        per_device_train_batch_size=1 if packed else rows_per_step(options), max_steps=options.steps, learning_rate=1e-5,
        lr_scheduler_type="constant", adam_beta2=0.95, train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to=[], dataloader_pin_memory=False, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    tokens: list[int] = []
    seconds: list[float] = []

    class Timed(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            mask = inputs.get("attention_mask")
            tokens.append(int(mask.sum()) if mask is not None else inputs["input_ids"].numel())
            self.begun = time.perf_counter()
            return super().training_step(model, inputs, *rest, **more)

    class AtStepEnd(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            seconds.append(time.perf_counter() - trainer.begun)

    adapter = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear") if options.lora else None
    trainer = Timed(
        model=model, args=config, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(options.model), peft_config=adapter,
        callbacks=[AtStepEnd()],
    )  # fmt: skip
    trainer.train()
    return {
        "tokens_per_s": [round(count / taken, 1) for count, taken in zip(tokens, seconds, strict=True)][1:],
        "tokens": tokens,
        "losses": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


SIDE = {
    "ours": ours,
    "trl-packed": lambda options: trl(options, packed=True),
    "trl-padded": lambda options: trl(options, packed=False),
}


def rows_per_step(options: argparse.Namespace) -> int:
    """Rows that hold about `--tokens` tokens together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [json.loads(line)["messages"] for line in options.data.read_text().splitlines()]
    lengths = [len(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]) for messages in rows]
    return max(1, round(options.tokens / statistics.mean(lengths)))


def matmul_peak(threads: int, dtype: str) -> float:
    """Operations per second of the fastest of ten matmuls of 1024 x 1024."""
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.randn(1024, 1024, dtype=getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begun)
    return 2 * 1024**3 / best


def parameters(model: Path) -> int:
    """How many weights the model's files hold; tied ones are there once."""
    from safetensors import safe_open

    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  not a dict
    return total


def table(found: dict[str, list[dict[str, Any]]], peak: float, flops_per_token: int) -> None:
    """The comparison, in Markdown; steps of ours and of TRL padded hold the same rows, those of TRL packed do not."""
    print("\n| | real tokens/s, median (least to most) | of the matmul peak | peak memory, MB | tokens a step | first and last loss |")
    print("|---|---:|---:|---:|---:|---:|")
    for side, results in found.items():
        rates = [rate for result in results for rate in result["tokens_per_s"]]
        memory = max(result["peak_bytes"] for result in results) / 2**20
        tokens = statistics.mean(count for result in results for count in result["tokens"][1:])
        rate = statistics.median(rates)
        losses = f"{results[0]['losses'][0]:.3f}, {results[0]['losses'][-1]:.3f}"
        share = rate * flops_per_token / peak
        print(f"| {side} | {rate:.0f} ({min(rates):.0f} to {max(rates):.0f}) | {share:.0%} | {memory:.0f} | {tokens:.0f} | {losses} |")
    print()
    for side in SIDES[1:]:
        pairs = zip(found["ours"], found[side], strict=True)
        ratios = [statistics.median(mine["tokens_per_s"]) / statistics.median(theirs["tokens_per_s"]) for mine, theirs in pairs]
        memory = max(r["peak_bytes"] for r in found["ours"]) / max(r["peak_bytes"] for r in found[side])
        print(f"ours / {side}: memory {memory:.2f}; tokens/s {statistics.median(ratios):.2f} (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
