"""What needs torch or a tokenizer and is asked for by others: inspect, estimate, convert, generate.

Each takes a JSON object and returns one; errors are the contract's. Nothing is written but what `convert` was told to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoModelForCausalLM, GenerationConfig

from posttrain_trainer import logs
from posttrain_trainer.contract.base import Model
from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.loader import StepLoader
from posttrain_trainer.data.look import histogram, packing, segments
from posttrain_trainer.data.prepare import Prepared, prepare_dataset
from posttrain_trainer.device import Device
from posttrain_trainer.models.convert import convert_model
from posttrain_trainer.models.estimate import estimate_memory, measure_model
from posttrain_trainer.models.load import load_config, load_tokenizer, max_positions, sequence_limits
from posttrain_trainer.models.source import ModelSource, find_model, loading, read_tokenizer
from posttrain_trainer.models.templates import resolve_template

M = TypeVar("M", bound=BaseModel)


class _Request(Model):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class _Inspect(_Request):
    data_path: str
    model_path: str
    train_args: dict[str, Any] = Field(default_factory=dict)
    examples: int = Field(default=0, ge=0, le=1000)


class _Estimate(_Request):
    train_args: dict[str, Any]
    nproc: int = Field(default=1, ge=1, le=65536)


class _Verify(_Request):
    prompt: str
    expect: str
    max_new_tokens: int = Field(default=32, ge=1, le=4096)


class _Convert(_Request):
    source: str
    target: str
    verify: _Verify | None = None


class _Generate(_Request):
    model_path: str
    adapter_path: str | None = None
    with_base: bool = False
    prompts: list[str | list[dict[str, Any]]]
    max_new_tokens: int = Field(default=64, ge=1, le=100_000)
    chat_template: str | None = None


def inspect(payload: dict[str, Any]) -> dict[str, Any]:
    """What a data file holds for a model: `{"data_path", "model_path", "train_args"?, "examples"?}` -> the data set's report.

    The report's keys (rows, samples, tokens, supervised_tokens, dropped, truncated, ...), `max_len`, the longest sample
    in tokens, `lengths` (see `histogram`), `packing`, and `examples`: the first so many samples as `segments` cuts them.
    `train_args` may hold any of the training arguments, e.g. train_on or chat_template.

    Raises:
        InvalidData: Bad rows, with `details["errors"]`.
    """
    request = _parse(_Inspect, payload)
    own = {"model_path": request.model_path, "data_path": request.data_path}
    args = _arguments({"ckpt_output_dir": ".", **request.train_args, **own})
    with tempfile.TemporaryDirectory(prefix="posttrain-inspect-") as folder:
        dataset, max_batch_len = _prepare(args, Path(folder))
        shown = range(min(request.examples, len(dataset)))
        tokenizer = load_tokenizer(args) if shown else None
        return {
            **dataset.report,
            "max_len": int(dataset.lengths.max()),
            "lengths": histogram(dataset.lengths),
            "packing": packing(dataset, max_batch_len),
            **({"examples": [segments(dataset, tokenizer, number) for number in shown]} if tokenizer is not None else {}),
        }


def estimate(payload: dict[str, Any]) -> dict[str, Any]:
    """What a run will take, without loading weights, from `{"train_args", "nproc"}`.

    Answers `{"memory": {"per_rank_bytes", "total_bytes", "fits", "parts"}, "parameters", "trainable", "steps", "tokens", "packing",
    "dtype", "device", "dataset"}`. `packing` is of an epoch (see `packing`). `tokens` are those of the whole run, all epochs; `fits` compares with the memory that the
    device has (the CPU: of all ranks together).

    Raises:
        InvalidData, ModelNotFound, InvalidArguments: As the run itself would.
    """
    request = _parse(_Estimate, payload)
    args = _arguments(request.train_args)
    device = Device.pick(args.device)
    dtype = device.resolve_dtype(args.dtype)
    size = measure_model(args)
    with tempfile.TemporaryDirectory(prefix="posttrain-estimate-") as folder:
        dataset, max_batch_len = _prepare(args, Path(folder))
        training = dataset if args.validation_split is None else dataset.split(args.validation_split, args.random_seed)[0]
        loader = _loader(training, args, max_batch_len, request.nproc)
        epoch_tokens, samples = int(training.lengths.sum(dtype="int64")), len(training)
        report, fill = dict(dataset.report), packing(training, max_batch_len)
    step_tokens = epoch_tokens / samples * min(args.effective_batch_size, samples)
    rank_tokens = max(1, round(step_tokens / request.nproc))
    memory = estimate_memory(
        size,
        args,
        dtype=dtype,
        device_kind=device.kind,
        ranks=request.nproc,
        tokens=min(max_batch_len, rank_tokens),
        accumulates=rank_tokens > max_batch_len,
    )
    total = memory.per_rank * request.nproc
    available = device.memory().total_bytes
    return {
        "memory": {
            "per_rank_bytes": memory.per_rank,
            "total_bytes": total,
            "fits": (total if device.kind == "cpu" else memory.per_rank) <= available,
            "available_bytes": available,
            "parts": vars(memory),
        },
        "parameters": size.parameters,
        "trainable": size.trainable,
        "steps": loader.total_steps,
        "tokens": round(epoch_tokens * loader.total_steps / loader.steps_per_epoch),
        "packing": fill,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.kind,
        "dataset": report,
    }


def convert(payload: dict[str, Any]) -> dict[str, Any]:
    """Write a model as safetensors: `{"source", "target", "verify"?}` -> `{"path", "parameters", "answer"?}`.

    `verify: {"prompt", "expect", "max_new_tokens"?}` asks the written copy greedily before it gets its name; when
    `expect` is not in the answer, nothing is kept.

    Raises:
        ModelNotFound, InvalidArguments: See `convert_model`; InvalidArguments also for an answer that is not as expected.
    """
    request = _parse(_Convert, payload)
    logs.quiet_progress_bars()
    target = Path(request.target).expanduser().absolute()
    answers: list[str] = []

    def check(folder: Path) -> None:
        if request.verify is not None:
            loaded = _Answers(ModelSource(str(folder), local=True), None, request.verify.max_new_tokens, None)
            answers.extend(loaded.to([request.verify.prompt])[0])
            if request.verify.expect not in answers[0]:
                raise InvalidArguments(
                    f"the converted model answers {answers[0]!r} to {request.verify.prompt!r}, not with {request.verify.expect!r}"
                )

    parameters = convert_model(Path(request.source).expanduser(), target, check=check)
    return {"path": str(target), "parameters": parameters, **({"answer": answers[0]} if answers else {})}


def generate(payload: dict[str, Any]) -> dict[str, Any]:
    """Greedy answers: `{"model_path", "adapter_path"?, "with_base"?, "prompts", "max_new_tokens"?, "chat_template"?}`.

    Gives `{"answers": [...], "cut": [...]}`, one per prompt, where `cut` tells that `max_new_tokens` ended the answer; with
    `with_base` also `base_answers` and `base_cut`, those without the adapter: all from one loading. A prompt is a user's
    text, or a list of messages. The adapter's tokenizer and template go before the model's.

    Raises:
        ModelNotFound: Model or adapter is not there.
        InvalidArguments: No chat template, or `with_base` without an adapter.
    """
    request = _parse(_Generate, payload)
    if request.with_base and request.adapter_path is None:
        raise InvalidArguments("with_base: without adapter_path the answers are the base model's already")
    logs.quiet_progress_bars()
    adapter = Path(request.adapter_path).expanduser() if request.adapter_path is not None else None
    source = find_model(request.model_path)
    answers = _Answers(source, adapter, request.max_new_tokens, request.chat_template)
    texts, cut = answers.to(request.prompts)
    result: dict[str, Any] = {"answers": texts, "cut": cut}
    if request.with_base:
        with answers.model.disable_adapter():
            result["base_answers"], result["base_cut"] = answers.to(request.prompts)
    return result


class _Answers:
    """A model with its tokenizer, on the best device, that answers greedily."""

    def __init__(self, source: ModelSource, adapter: Path | None, max_new_tokens: int, chat_template: str | None) -> None:
        device = Device.pick("auto")
        loader: Any = AutoModelForCausalLM
        with loading(source):
            model = loader.from_pretrained(source.name, dtype=device.resolve_dtype("auto"), use_safetensors=True, **source.options())
        self.model: Any = model if adapter is None else _with_adapter(model, adapter)
        self._tokenizer = _tokenizer(source, adapter, chat_template)
        self.model.to(device.torch_device).eval()
        pad = self._tokenizer.pad_token_id
        self._ends = _end_tokens(model.generation_config, self._tokenizer)
        self._settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self._ends,
            pad_token_id=pad if pad is not None else self._tokenizer.eos_token_id,
        )
        self.model.generation_config = self._settings

    @torch.inference_mode()
    def to(self, prompts: list[Any]) -> tuple[list[str], list[bool]]:
        """One answer per prompt, and whether it was cut."""
        answers = [self._answer(prompt) for prompt in prompts]
        return [text for text, _ in answers], [cut for _, cut in answers]

    def _answer(self, prompt: str | list[dict[str, Any]]) -> tuple[str, bool]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = self.model.generate(**ids.to(self.model.device), generation_config=self._settings)
        tokens = output[0, ids["input_ids"].shape[1] :]
        answer: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return answer.strip(), int(tokens[-1]) not in self._ends


def _with_adapter(model: Any, folder: Path) -> Any:
    # Imported here: peft takes seconds.
    from posttrain_trainer.models.lora import load_adapter

    return load_adapter(model, folder)


def _tokenizer(source: ModelSource, adapter: Path | None, chat_template: str | None) -> Any:
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        source = ModelSource(str(adapter.resolve()), local=True)
    tokenizer = read_tokenizer(source)
    if chat_template is not None:
        tokenizer.chat_template = resolve_template(chat_template)
    if not tokenizer.chat_template:
        raise InvalidArguments(f"{source.name} has no chat template; name one by chat_template")
    return tokenizer


def _end_tokens(config: GenerationConfig, tokenizer: Any) -> list[int]:
    """Where an answer ends: what the model names, and the tokenizer's end token."""
    named = config.eos_token_id
    ends = named if isinstance(named, list) else [named]
    return sorted({int(end) for end in (*ends, tokenizer.eos_token_id) if end is not None})


def _prepare(args: FullTrainingArguments, cache_dir: Path) -> tuple[Prepared, int]:
    """The tokenised training data, and the most tokens of a micro-batch."""
    positions = max_positions(load_config(find_model(args.model_path)))
    max_seq_len, max_batch_len = sequence_limits(args, positions)
    tokenizer = load_tokenizer(args)
    return prepare_dataset(args.data_path, tokenizer=tokenizer, args=args, max_seq_len=max_seq_len, cache_dir=cache_dir), max_batch_len


def _loader(dataset: Prepared, args: FullTrainingArguments, max_batch_len: int, world_size: int) -> StepLoader:
    return StepLoader(
        dataset,
        effective_batch_size=args.effective_batch_size,
        max_batch_len=max_batch_len,
        rank=0,
        world_size=world_size,
        seed=args.random_seed,
        shuffle=args.shuffle,
        num_epochs=args.num_epochs,
        packed=args.is_padding_free,
        pad_id=0,
        max_steps_per_epoch=args.max_steps_per_epoch,
        max_steps=args.max_steps,
    )


def _arguments(data: dict[str, Any]) -> FullTrainingArguments:
    return _parse(FullTrainingArguments, data).resolved()


def _parse(model: type[M], data: dict[str, Any]) -> M:
    """Validate, with a sentence for each fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'request'}: {fault['msg']}" for fault in error.errors())
        raise InvalidArguments(faults) from error
