"""Every error of the native request speaks of fields that the native request has, by the path at which the caller wrote them."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from pydantic import BaseModel, ValidationError

from posttrain_service.wire import jobs as jobs_module
from posttrain_service.wire.errors import field_errors, summary
from posttrain_service.wire.jobs import JobRequest
from posttrain_trainer.contract import methods, spec
from posttrain_trainer.contract.base import Disagreement
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

BASE = {"model": "tiny", "dataset": "file-1"}
DPO, PRETRAIN = {"kind": "dpo"}, {"kind": "pretrain"}
LORA = {"kind": "lora"}

CASES: list[tuple[dict[str, object], str]] = [
    ({"training": {"max_seq_len": 100, "max_batch_len": 50}}, "training.max_batch_len"),
    ({"training": {"max_seq_len": 100, "max_batch_len": 150}, "method": DPO}, "training.max_batch_len"),
    ({"validation_dataset": "f", "validation_split": 0.5}, "validation_dataset"),
    ({"validation_dataset": "f", "training": {"validation_split": 0.5}}, "validation_dataset"),
    ({"training": {"validation_every_steps": 5}}, "training.validation_every_steps"),
    ({"training": {"max_validation_steps": 5}}, "training.max_validation_steps"),
    ({"checkpoints": {"keep_best": 2}}, "checkpoints.keep_best"),
    ({"training": {"keep_best": 2}}, "training.keep_best"),
    ({"checkpoints": {"keep_best": 2, "metric": "validation_accuracy"}}, "checkpoints.keep_best"),
    ({"training": {"profile_steps": [5, 3]}}, "training.profile_steps"),
    ({"training": {"merge_lora": True}}, "training.merge_lora"),
    ({"training": {"fsdp": {"shard_ranks": 2}}}, "training.fsdp.shard_ranks"),
    ({"training": {"min_lr_ratio": 0.1, "lr_scheduler": "linear"}}, "training.min_lr_ratio"),
    ({"training": {"dtype": "fp16", "device": "cpu"}}, "training.dtype"),
    ({"training": {"train_on": "all"}, "method": DPO}, "training.train_on"),
    ({"training": {"train_on": "all", "method": DPO}}, "training.train_on"),
    ({"training": {"chat_template": "chatml"}, "method": PRETRAIN}, "training.chat_template"),
    ({"training": {"is_padding_free": False}, "method": PRETRAIN}, "training.is_padding_free"),
    ({"training": {"over_length": "truncate_right"}, "method": PRETRAIN}, "training.over_length"),
    ({"training": {"max_seq_len": 64}, "method": {**PRETRAIN, "block_size": 128}}, "method.block_size"),
    ({"training": {"max_seq_len": 64, "method": {**PRETRAIN, "block_size": 128}}}, "training.method.block_size"),
    ({"method": {**DPO, "precompute_reference": False}}, "method.precompute_reference"),
    ({"training": {"qat": {}}, "adapter": LORA}, "training.qat"),
    ({"training": {"qat": {}, "lora": {}}}, "training.qat"),
    ({"method": {**DPO, "label_smoothing": 0.1, "loss_type": "hinge"}}, "method.label_smoothing"),
    ({"training": {"method": {**DPO, "label_smoothing": 0.1, "loss_type": "hinge"}}}, "training.method.label_smoothing"),
    ({"method": {**DPO, "reference_free": True, "precompute_reference": False}, "adapter": LORA}, "method.reference_free"),
    ({"resources": {"devices": ["a", "a"]}}, "resources.devices"),
    ({"retention": {"keep": True, "ttl_s": 5}}, "retention.ttl_s"),
    ({"retry": {"max_attempts": 2, "on": ["completed"]}}, "retry.on"),
    ({"retry": {"on": ["lost"]}}, "retry.on"),
    ({"training": {"resume": "step-000001"}}, "training.resume"),
    ({"method": DPO, "training": {"method": {**DPO, "beta": 0.5}}}, "method"),
    ({"adapter": LORA, "training": {"lora": {"rank": 3}}}, "adapter"),
    ({"validation_split": 0.1, "training": {"validation_split": 0.2}}, "validation_split"),
    ({"loggers": [], "training": {"loggers": [{"kind": "jsonl"}]}}, "loggers"),
    ({"checkpoints": {"every_steps": 5}, "training": {"save_every_steps": 6}}, "checkpoints.every_steps"),
    ({"checkpoints": {"metric": "loss"}, "training": {"best_metric": "validation_loss"}}, "checkpoints.metric"),
    ({"resources": {"devices": 2}, "torchrun": {"nproc_per_node": 1}}, "resources.devices"),
    *(({"torchrun": {name: value}}, f"torchrun.{name}") for name, value in
      {"nnodes": 2, "node_rank": 1, "rdzv_id": "x", "rdzv_endpoint": "h:1", "master_addr": "h", "master_port": 5}.items()),
    ({"torchrun": {"nproc_per_node": "gpu"}}, "torchrun.nproc_per_node"),
]  # fmt: skip

UNIONS: list[tuple[dict[str, object], str, str]] = [
    ({"dataset": {"rows": [{}], "x": 1}}, "dataset.x", "dataset.x: no such field"),
    ({"dataset": {"rowz": 1}}, "dataset.rowz", "dataset.rowz: no such field"),
    ({"dataset": {}}, "dataset.rows", "dataset.rows: is required"),
    ({"dataset": {"rows": []}}, "dataset.rows", "dataset.rows: "),
    ({"dataset": {"rows": [3]}}, "dataset.rows.0", "dataset.rows.0: Input should be an object (got 3)"),
    ({"dataset": 5}, "dataset", "dataset: Input should be a valid string (got 5); or Input should be an object (got 5)"),
    ({"validation_dataset": {"rows": [{}], "x": 1}}, "validation_dataset.x", "validation_dataset.x: no such field"),
    ({"resources": {"devices": 0}}, "resources.devices", "resources.devices: Input should be greater than or equal to 1 (got 0)"),
    ({"resources": {"devices": "some"}}, "resources.devices", "or Input should be 'auto' (got 'some'); or Input should be a list"),
    ({"resources": {"devices": True}}, "resources.devices", "resources.devices: must be a number, not true"),
    ({"resources": {"devices": ["a b"]}}, "resources.devices.0", "resources.devices.0: "),
    ({"resources": {"devices": ["a", True]}}, "resources.devices.1", "resources.devices.1: must be a number, not true"),
    ({"torchrun": {"nproc_per_node": 0}}, "torchrun.nproc_per_node", "torchrun.nproc_per_node: "),
    ({"method": {"kind": "dpo", "x": 1}}, "method.x", "method.x: no such field"),
    ({"method": {"kind": "dpo", "beta": -1}}, "method.beta", "method.beta: "),
    ({"method": {"beta": 1}}, "method", "method: "),
    ({"method": {"kind": "magic"}}, "method", "method: "),
    ({"training": {"method": {"kind": "dpo", "x": 1}}}, "training.method.x", "training.method.x: no such field"),
    ({"loggers": [{"kind": "wandb", "x": 1}]}, "loggers.0.x", "loggers.0.x: no such field"),
    ({"metadata": {"a": 1}}, "metadata.a", "metadata.a: "),
    ({"metadata": {"": "x"}}, "metadata.", "metadata.: "),
    ({"adapter": {"rank": 0}}, "adapter.rank", "adapter.rank: "),
    ({"x": 1, "dataset": {"rowz": 1}}, "dataset.rowz", "dataset.rowz: no such field"),
]


def errors_of(changes: dict[str, object]) -> tuple[list[dict[str, object]], ValidationError]:
    body = BASE | changes
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate(body)
    return field_errors(caught.value.errors(include_url=False), body), caught.value


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def exists(path: str, model: type[BaseModel] = JobRequest) -> bool:
    name, _, rest = path.partition(".")
    if name not in model.model_fields:
        return False
    return not rest or any(exists(rest, inner) for inner in models_in(model.model_fields[name].annotation))


@pytest.mark.parametrize(("changes", "param"), CASES)
def test_a_contradiction_names_fields_of_the_request(changes, param):
    [fault], error = errors_of(changes)
    message = str(fault["message"])
    assert fault["loc"] == param
    assert exists(param)
    assert message.startswith(param)
    assert summary([fault]) == message, "the path is not said twice"
    [item] = error.errors()
    found = item["ctx"]["error"]
    assert isinstance(found, Disagreement)
    prefix = [part for part in item["loc"] if part in ("training", "method", "resources", "retention", "retry", "fsdp")]
    for name in found.fields:
        assert exists(".".join([*prefix, name])), name
    # No name of the trainer's stands there bare.
    for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
        if "_" in word and word.split(".")[-1] in FullTrainingArguments.model_fields:
            assert exists(word), word


@pytest.mark.parametrize(("changes", "param", "text"), UNIONS)
def test_unions_are_told_by_the_path_that_was_written(changes, param, text):
    faults, _ = errors_of(changes)
    assert faults[0]["loc"] == param
    assert text in summary(faults)
    assert not re.search(r"constrained|function-|InlineRows|literal\[|tuple\[|Knobs", str(faults))


def raised_at(error: BaseException | None) -> Iterator[tuple[str, int]]:
    while error is not None:
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        if isinstance(error.__cause__, ValidationError):
            for item in error.__cause__.errors():
                yield from raised_at(item["ctx"]["error"])
        error = error.__cause__


def test_the_table_reaches_every_validator_across_fields():
    reached = {place for changes, _ in CASES for item in errors_of(changes)[1].errors() for place in raised_at(item["ctx"]["error"])}
    for module in (jobs_module, methods, spec):
        path = str(module.__file__)
        tree = ast.parse(Path(path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == TorchrunArguments.__name__:
                node.body = []  # what the native request cannot reach: it refuses several hosts itself
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and "Disagreement" in ast.unparse(node):
                lines = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                assert any(place == path and line in lines for place, line in reached), f"{path}:{node.lineno}"
            elif isinstance(node, ast.Raise) and module is not jobs_module:
                assert "ValueError" not in ast.unparse(node), f"{path}:{node.lineno} names no fields; raise Disagreement"


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"master_addr": "h"}, ["master_addr", "master_port"]),
        ({"master_addr": "h", "master_port": 1, "rdzv_endpoint": "h:1"}, ["rdzv_endpoint", "master_addr"]),
        ({"node_rank": 1}, ["node_rank", "nnodes"]),
        ({"nnodes": 2}, ["nnodes", "rdzv_endpoint", "master_addr", "master_port"]),
    ],
)
def test_how_torchrun_starts_by_hand(values, fields):
    with pytest.raises(ValidationError) as caught:
        TorchrunArguments(**values)
    [item] = caught.value.errors()
    assert item["ctx"]["error"].fields == fields
