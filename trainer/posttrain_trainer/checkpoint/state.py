"""Everything a run needs to go on exactly: tensors by torch.distributed.checkpoint, the rest as JSON.

`state/` of a checkpoint holds `.metadata` and `*.distcp` (DCP: trained weights and optimizer moments, resharded on
load, so another number of ranks may go on), `progress.json` and `rng-rank-<r>.json`. DCP's metadata is a pickle: call
`load_tensors` only after the files' hashes were compared with the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from posttrain_trainer.contract.errors import CheckpointInvalid
from posttrain_trainer.contract.rundir import read_json, write_json


@dataclass
class Progress:
    """How far a run is, over all its attempts; the loop counts it up."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    epoch: float = 0.0
    """Epochs done."""
    samples_seen: int = 0
    """Samples of the steps done."""
    tokens_seen: int = 0
    """Tokens of the steps done."""
    skipped_steps: int = 0
    """Steps that were not applied because loss or gradients were not finite."""
    skipped_in_a_row: int = 0
    """How many of them came last."""
    loss: float | None = None
    """Loss of the last step; None when it was not finite."""
    loader: dict[str, Any] = field(default_factory=dict)
    """The loader's own position."""
    data: dict[str, int] = field(default_factory=dict)
    """Size of the data set, by which another one is recognised."""


def state_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint's state holds, by key: trained weights and optimizer state themselves, no copies.

    Args:
        module: The sharded model; weights that are not trained (under an adapter) are left out, they are the base's.
        optimizer: Its tensors go under the names of their parameters.
    """
    names = trained_tensors(module)
    return {f"model.{name}": tensor.detach() for name, tensor in names.items()} | _optimizer_tensors(optimizer, names)


def save_tensors(folder: Path, tensors: dict[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Write what `state_tensors` gave, or copies of it; every rank calls it, each writes its own shards.

    Args:
        folder: An existing, empty folder.
        tensors: By key.
        group: For the ranks' agreement on who writes what; None = that of all ranks from the start.

    Raises:
        OSError: A file could not be written.
    """
    save(tensors, storage_writer=FileSystemWriter(folder, sync_files=True), process_group=group)


def read_whole(folder: Path, keys: Sequence[str], group: ProcessGroup) -> dict[str, Tensor]:
    """Whole tensors of a state that was just written by this run, on the CPU; `group` has the caller alone."""
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    whole = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in keys}  # type: ignore[union-attr]
    load(whole, storage_reader=reader, process_group=group)
    return whole


def tensor_bytes(module: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of all that `save_tensors` would write now, over all ranks."""
    # numel of a sharded tensor counts all shards
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(module, optimizer).values())


def load_tensors(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Read what `save_tensors` wrote into a module and optimizer of the same architecture, in place; all ranks call it.

    Raises:
        CheckpointInvalid: Weights are missing, or of another shape.
    """
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    names = trained_tensors(module)
    model = {f"model.{name}": tensor for name, tensor in names.items()}
    _make_optimizer_state(optimizer)
    optim = _optimizer_tensors(optimizer, names)
    for key, tensor in (model | optim).items():
        if key in stored and tuple(stored[key].size) != tuple(tensor.shape):  # type: ignore[union-attr]
            raise CheckpointInvalid(f"{key} has shape {tuple(stored[key].size)} in {folder}, {tuple(tensor.shape)} in this model")  # type: ignore[union-attr]
    if missing := [key for key in model if key not in stored]:
        raise CheckpointInvalid(f"{folder} lacks {len(missing)} weights of this model, the first is {missing[0]}")
    if unknown := [key for key in stored if key not in model and key not in optim]:
        raise CheckpointInvalid(f"{folder} holds {len(unknown)} tensors this run has no place for, the first is {unknown[0]}")
    load(model | {key: tensor for key, tensor in optim.items() if key in stored}, storage_reader=reader)
    _forget_state_not_in(optimizer, names, set(stored))


def rng_states(kind: str) -> dict[str, str]:
    """The random generators' states of this rank by torch device type, in hex: the CPU's, and that of `kind`."""
    states = {"cpu": bytes(torch.get_rng_state().tolist()).hex()}
    if kind != "cpu":
        states[kind] = bytes(torch.get_device_module(kind).get_rng_state().tolist()).hex()
    return states


def save_rng(folder: Path, rank: int, states: dict[str, str]) -> None:
    """Write one rank's `rng_states` as JSON into the checkpoint's state folder."""
    write_json(_rng_path(folder, rank), states)


def load_rng(folder: Path, rank: int, kind: str) -> bool:
    """Restore this rank's random generators; False when the checkpoint has none for this rank and device."""
    states = read_json(_rng_path(folder, rank))
    if states is None or kind not in states:
        return False
    torch.set_rng_state(_bytes(states["cpu"]))
    if kind != "cpu":
        torch.get_device_module(kind).set_rng_state(_bytes(states[kind]))
    return True


def save_progress(folder: Path, progress: Progress) -> None:
    """Write counters and the loader's position as JSON; rank 0 only."""
    write_json(folder / "progress.json", asdict(progress))


def load_progress(folder: Path) -> Progress:
    """Read what `save_progress` wrote.

    Raises:
        CheckpointInvalid: The file is missing or lacks a counter.
    """
    data = read_json(folder / "progress.json")
    names = {one.name for one in fields(Progress)}
    if not isinstance(data, dict) or set(data) != names:
        raise CheckpointInvalid(f"{folder} has no progress.json of this version")
    return Progress(**data)


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and saved buffers by name; a tied parameter appears once, under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if isinstance(tensor, Tensor) and not frozen and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _optimizer_tensors(optimizer: Optimizer, names: dict[str, Tensor]) -> dict[str, Tensor]:
    name_of = {id(tensor): name for name, tensor in names.items()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name_of[id(parameter)]}.{key}"] = value
            else:
                assert value is None, f"optimizer state {key} is a {type(value).__name__}, which is not saved"
    return tensors


def _make_optimizer_state(optimizer: Optimizer) -> None:
    """Let the optimizer create its moments by a step that changes nothing: zero gradients at a learning rate of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _forget_state_not_in(optimizer: Optimizer, names: dict[str, Tensor], stored: set[str]) -> None:
    """Drop moments that the saved run did not have yet: its parameters had never been stepped."""
    name_of = {id(tensor): name for name, tensor in names.items()}
    for parameter in list(optimizer.state):
        keys = [f"optim.{name_of[id(parameter)]}.{key}" for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)]
        if not all(key in stored for key in keys):
            del optimizer.state[parameter]


def _rng_path(folder: Path, rank: int) -> Path:
    return folder / f"rng-rank-{rank}.json"


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
