"""From a request to everything that is decided before a job is stored: model, knobs with their defaults, devices.

Nothing is written here. What is left to the machine that trains (dtype, device) stays `auto`; everything else is a
number in the stored spec.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from posttrain_service.domain.slots import check_fits
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.names import disagreement
from posttrain_service.work import models
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

if TYPE_CHECKING:
    from posttrain_service.settings import Settings
    from posttrain_service.wire.jobs import Devices, JobRequest

PATHS = frozenset({"model_path", "data_path", "validation_data_path", "ckpt_output_dir", "data_output_dir"})
"""Arguments that are paths: the spec holds none of them, so that a storage folder may move between two attempts."""


@dataclass(frozen=True)
class Prepared:
    """A request whose model, knobs and devices have been found good."""

    request: JobRequest
    model: models.Model
    training: dict[str, Any]
    """Every knob of FullTrainingArguments but the paths, defaults filled in."""
    torchrun: dict[str, Any]
    """Every knob of TorchrunArguments but nproc_per_node, which the devices decide."""
    devices: Devices
    warnings: list[str] = field(default_factory=list)


def prepare(request: JobRequest, settings: Settings, slots: Sequence[str], model: models.Model) -> Prepared:
    """Fill in the knobs and see that the devices can ever be had.

    Args:
        request: What was asked for.
        settings: Of the service.
        slots: Names of all devices of this host.
        model: What the request's model was found to be.

    Raises:
        InvalidRequest: Something this host cannot honour, by its name.
    """
    args = _train_args(request, model)
    check_fits(request.devices, slots)
    _check_machine(args, slots)
    torch_args = request.torch_args(1)
    knobs = torch_args.model_dump(mode="json", exclude={"nproc_per_node"})
    if "shutdown_timeout_s" not in request.torchrun.model_fields_set:
        knobs["shutdown_timeout_s"] = max(1, math.ceil(settings.stop_grace_s))
    return Prepared(request, model, args.model_dump(mode="json", exclude=set(PATHS)), knobs, request.devices)


def train_arguments(
    spec: dict[str, Any], run_dir: RunDir, models_dir: Path, model: models.Model | None = None
) -> FullTrainingArguments:
    """The trainer's arguments of a stored spec, its paths looked up anew, but for a model that is given.

    Raises:
        InvalidRequest: The model has gone, or has come to lead out of the models folder.
    """
    placed = spec["data"].get("model")
    if model is None and placed is not None:  # a result of another job, which the run keeps itself
        model = models.at(spec["model"], run_dir.path / placed, run_dir.path)
    elif model is None:
        model = models.find(spec["model"], models_dir)
    validation = spec["data"].get("validation")
    return FullTrainingArguments(
        **spec["training"],
        model_path=model.location,
        data_path=str(run_dir.path / spec["data"]["train"]),
        validation_data_path=None if validation is None else str(run_dir.path / validation),
        ckpt_output_dir=str(run_dir.path),
        data_output_dir=str(run_dir.data),
    )


def torch_arguments(spec: dict[str, Any], num_devices: int) -> TorchrunArguments:
    """Torchrun's arguments of a stored spec on `num_devices` devices."""
    return TorchrunArguments(**spec["torchrun"] | {"nproc_per_node": num_devices})


def _train_args(request: JobRequest, model: models.Model) -> FullTrainingArguments:
    try:
        args = request.train_args(
            model_path=model.location,
            data_path="data/train",
            ckpt_output_dir="run",
            validation_data_path=None if request.validation_dataset is None else "data/validation",
        ).resolved()
        return _with_lengths(args, model)
    except ValidationError as error:
        found = disagreement(error, request.field_of)
        if found is None:
            raise
        raise InvalidRequest(str(found), param=found.fields[0]) from error


def _with_lengths(args: FullTrainingArguments, model: models.Model) -> FullTrainingArguments:
    """The same with the lengths filled in, where the model's own limit is known here (a local model's is)."""
    if model.max_positions is None:
        return args
    longest = args.max_seq_len
    if longest is None:
        room = models.DEFAULT_SEQ_LEN if args.max_batch_len is None else args.max_batch_len // args.documents_per_sample
        longest = min(models.DEFAULT_SEQ_LEN, model.max_positions, room)
    elif longest > model.max_positions:
        raise InvalidRequest(
            f"training.max_seq_len is {longest}, but model {model.name!r} takes at most {model.max_positions} tokens",
            param="training.max_seq_len",
        )
    capacity = args.max_batch_len or max(longest * args.documents_per_sample, models.DEFAULT_SEQ_LEN)
    return FullTrainingArguments(**args.model_dump() | {"max_seq_len": longest, "max_batch_len": capacity})


def _check_machine(args: FullTrainingArguments, slots: Sequence[str]) -> None:
    on_cpu = all(slot.startswith("cpu:") for slot in slots)
    if args.device == "cuda" and on_cpu and not Path("/dev/kfd").exists():
        raise InvalidRequest("training.device is 'cuda', but this server has no such device", param="training.device")
    if args.device == "mps" and sys.platform != "darwin":
        raise InvalidRequest("training.device is 'mps', but this server is no Apple machine", param="training.device")
    trains_on_cpu = args.device == "cpu" or (args.device == "auto" and on_cpu and sys.platform != "darwin")
    if args.fsdp.cpu_offload and trains_on_cpu:
        raise InvalidRequest(
            "training.fsdp.cpu_offload moves weights to host memory, and this job trains on the CPU; leave it out",
            param="training.fsdp.cpu_offload",
        )
    if args.activation_offloading and (trains_on_cpu or args.device == "mps"):
        raise InvalidRequest(
            "training.activation_offloading moves activations to host memory, where this job's are already; leave it out",
            param="training.activation_offloading",
        )
    if args.attention == "flash" and trains_on_cpu:
        raise InvalidRequest(
            "training.attention is 'flash', and this job trains on the CPU, which has no such kernel; use sdpa or auto",
            param="training.attention",
        )
    if args.dtype == "fp16" and trains_on_cpu:
        raise InvalidRequest("training.dtype fp16 cannot train on cpu; use bf16 or fp32", param="training.dtype")
