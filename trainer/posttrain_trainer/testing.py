"""What tests of the trainer stand on: a tiny model with its tokenizer, tiny rows, and ranks without torchrun.

Everything is made on the spot and the same each time; nothing is downloaded. Not for production code.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain_trainer.models.templates import CHATML

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
_TEXT = "red blue green seven apples boats under over quickly slow river stone light answer question name of the a is"
_WORDS = _TEXT.split(" ")


def tiny_model(
    folder: str | Path,
    *,
    vocab_size: int = 512,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    max_positions: int = 2048,
    tied: bool = True,
    pad_is_eos: bool = True,
    chat_template: str | None = CHATML,
    seed: int = 0,
) -> Path:
    """Write a random Llama-shaped model and a byte-level BPE tokenizer in Hugging Face layout; returns the folder.

    Loadable by `AutoModelForCausalLM` and `AutoTokenizer`, fp32, about 0.1 M parameters by default.

    Args:
        folder: Made if missing; files of the same name are replaced.
        vocab_size: Rows of the embedding, at least 260 (256 bytes and 4 special tokens); the tokenizer may use fewer.
        layers: Transformer blocks.
        hidden: Width; divisible by `heads`.
        heads: Attention heads (half as many key-value heads).
        max_positions: The model's length limit in tokens.
        tied: Output head and embedding share one tensor, as in SmolLM2.
        pad_is_eos: Padding token is the end token `<|im_end|>`, as in SmolLM2; False = a token of its own.
        chat_template: Jinja text; None = a model without one.
        seed: Seed of the weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tiny_tokenizer(vocab_size, max_positions, pad_is_eos=pad_is_eos)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    return folder


def tiny_rows(n: int) -> list[dict[str, Any]]:
    """`n` conversations of differing lengths (about 15 to 60 tokens), every third with a system turn, every fifth with four turns."""
    rows = []
    for i in range(n):
        words = [_WORDS[(i * 7 + k * 3) % len(_WORDS)] for k in range(2 + i % 9)]
        messages = [
            {"role": "user", "content": f"question {i}: " + " ".join(words)},
            {"role": "assistant", "content": f"answer {i} is " + " ".join(reversed(words))},
        ]
        if i % 3 == 0:
            messages.insert(0, {"role": "system", "content": "answer quickly"})
        if i % 5 == 0:
            messages += [{"role": "user", "content": "name it"}, {"role": "assistant", "content": words[0]}]
        rows.append({"messages": messages})
    return rows


def tiny_pairs(n: int) -> list[dict[str, Any]]:
    """`n` pairs of answers: the right one of `tiny_rows` against the same words for every question."""
    rows = []
    for row in tiny_rows(n):
        answer = next(number for number, message in enumerate(row["messages"]) if message["role"] == "assistant")
        prompt, chosen = row["messages"][:answer], row["messages"][answer]
        rows.append({"prompt": prompt, "chosen": [chosen], "rejected": [{"role": "assistant", "content": "stone light river"}]})
    return rows


def write_rows(path: str | Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSONL; returns the path."""
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or gradient as one plain tensor, gathered from all ranks where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


_RANK = """
import os, runpy, sys
from posttrain_trainer.startup import leave, quick_imports
with quick_imports():
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # as if the file were run itself
    runpy.run_path(sys.argv[0], run_name="__main__")
leave(0)
"""


def run_ranks(script: str | Path, world_size: int, *argv: str, timeout_s: float = 120.0) -> list[str]:
    """Run a Python file as `world_size` ranks with torchrun's environment, without torchrun; returns each rank's stdout.

    Real processes are what it buys: collectives and sharding can only be seen wrong across ranks.

    Raises:
        AssertionError: A rank ended with another code than 0; the message holds its stderr.
        subprocess.TimeoutExpired: The ranks did not end in time; all of them are killed first.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, ranks)
        # Files, not pipes: a rank whose pipe is full would wait for us while we wait for another rank.
        files = [tuple(stack.enter_context(tempfile.TemporaryFile("w+")) for _ in "oe") for _ in range(world_size)]
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            out, err = files[rank]
            ranks.append(subprocess.Popen([sys.executable, "-c", _RANK, str(script), *argv], env=env, stdout=out, stderr=err))
        end = time.monotonic() + timeout_s
        for process in ranks:
            process.wait(timeout=max(0.0, end - time.monotonic()))
        for rank, process in enumerate(ranks):
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{_content(files[rank][1])}"
        return [_content(out) for out, _ in files]


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _tiny_tokenizer(vocab_size: int, max_positions: int, *, pad_is_eos: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the words of `tiny_rows`; every byte is a token, so any text encodes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(_SPECIAL):
        raise ValueError(f"vocab_size {vocab_size} is below {len(alphabet) + len(_SPECIAL)}: bytes and special tokens do not fit")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    corpus = [message["content"] for row in tiny_rows(60) for message in row["messages"]]
    tokenizer.train_from_iterator([*corpus, "system\nuser\nassistant\n"], trainer)
    unk, bos, eos, pad = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unk,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos if pad_is_eos else pad,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
