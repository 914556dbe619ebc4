"""A model in any form we read (GGUF, or a Hugging Face folder) -> a folder of safetensors, complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from posttrain_trainer.contract.errors import InvalidArguments, ModelNotFound
from posttrain_trainer.models.source import ModelSource, find_model, loading, read_tokenizer


def convert_model(source: Path, target: Path, *, check: Callable[[Path], None] | None = None) -> int:
    """Write model and tokenizer of `source` as `target`, in fp32; returns the number of parameters.

    Args:
        source: A .gguf file, a folder with exactly one, or a folder in Hugging Face layout with safetensors.
        target: Must not exist; appears complete, under its name, by one rename.
        check: Called with the finished folder before it gets its name; what it raises undoes everything.

    Raises:
        ModelNotFound: Nothing to convert there.
        InvalidArguments: `target` exists.
    """
    if target.exists() or target.is_symlink():
        raise InvalidArguments(f"{target} exists; remove it or name another target")
    gguf = _gguf_file(source)
    with _appearing(target) as folder:
        model, tokenizer = _read_gguf(gguf) if gguf is not None else _read_folder(source)
        parameters: int = sum(p.numel() for p in model.parameters())
        _complete_generation(model, tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _check_tokenizer(folder, tokenizer)
        del model
        if check is not None:
            check(folder)
    return parameters


def _gguf_file(source: Path) -> Path | None:
    """The GGUF file that is meant; None when the source is a folder in Hugging Face layout."""
    if source.is_file():
        if source.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{source} is no GGUF file; give one, or a folder in Hugging Face layout")
        return source
    if not source.is_dir():
        raise ModelNotFound(f"{source} does not exist")
    if (source / "config.json").is_file():
        return None
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ModelNotFound(f"{source} has no config.json and {len(found)} GGUF files; name one file")
    return found[0]


def _read_gguf(path: Path) -> tuple[Any, Any]:
    source = ModelSource(str(path.parent), local=True)
    loader: Any = AutoModelForCausalLM
    with loading(source):
        # Without dequantize the model counts as quantised and cannot be saved.
        model = loader.from_pretrained(
            source.name, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **source.options()
        )
    tokenizer = read_tokenizer(source, gguf_file=path.name)
    for config in (model.config, model.generation_config):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    return model, tokenizer


def _read_folder(path: Path) -> tuple[Any, Any]:
    source = find_model(str(path))
    loader: Any = AutoModelForCausalLM
    with loading(source):
        model, info = loader.from_pretrained(
            source.name, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **source.options()
        )
    tokenizer = read_tokenizer(source)
    if missing := sorted(info["missing_keys"]):
        raise ModelNotFound(f"the files of {path} lack {len(missing)} weights, e.g. {missing[0]}; fetch the model again")
    return model, tokenizer


def _complete_generation(model: Any, tokenizer: Any) -> None:
    """Say in generation_config.json where answers end: a GGUF file states it in its tokenizer only."""
    config = model.generation_config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, getattr(tokenizer, name))


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Check that the saved tokenizer says the same as the one that was read: template and special tokens."""
    again = read_tokenizer(ModelSource(str(folder), local=True))
    for name in ("chat_template", "eos_token", "pad_token", "bos_token"):
        if getattr(again, name) != getattr(tokenizer, name):
            raise InvalidArguments(f"{name} of the tokenizer does not survive saving: {getattr(tokenizer, name)!r} became {getattr(again, name)!r}")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder under a temporary name beside `target`, renamed when the block ends well, removed when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{os.getpid()}.tmp"
    folder.mkdir()
    try:
        yield folder
        for file in folder.iterdir():
            _sync(file)
        _sync(folder)
        folder.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
