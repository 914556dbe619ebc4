"""Loading without the whole: the model is built without memory, sharded, and each rank then reads its own rows alone.

From `from_pretrained` every rank would hold the whole model before it keeps its shard. Here parameters are on the meta
device (by accelerate) until FSDP has cut them; then each rank reads from the safetensors files the rows that are its
own. Where the files' names are not the model's (renamed or fused on load, which is `from_pretrained`'s business), the
caller loads the whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from posttrain_trainer.models import attention
from posttrain_trainer.models.source import ModelSource, loading

_MAPPED_BYTES = 32 * 2**20
_log = logging.getLogger(__name__)


class WeightFiles:
    """The tensors of a model's safetensors files, of which any rows can be read without the rest.

    Args:
        paths: The files.

    Raises:
        SafetensorError: One of them is damaged or cut short.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        self._file: tuple[Path, Any] | None = None
        self._bytes = 0
        for path in paths:
            self._path_of.update(dict.fromkeys(self._open(path).keys(), path))

    @staticmethod
    def of(source: ModelSource) -> WeightFiles | None:
        """Those of a model; None when it has none in safetensors (then the loader says what is wrong)."""
        index = _file(source, SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            single = _file(source, SAFE_WEIGHTS_NAME)
            return None if single is None else WeightFiles([single])
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [_file(source, name) for name in names]
        return None if None in paths else WeightFiles([path for path in paths if path is not None])

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._path_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows [start, stop) of a tensor of at least one dimension, in memory of their own; only they are read."""
        return self._copied(self._slice(name)[start:stop], dtype)

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole tensor, in memory of its own."""
        return self._copied(self._open(self._path_of[name]).get_tensor(name), dtype)

    def _slice(self, name: str) -> Any:
        return self._open(self._path_of[name]).get_slice(name)

    def _copied(self, mapped: Tensor, dtype: torch.dtype) -> Tensor:
        self._bytes += mapped.nbytes
        return torch.empty(mapped.shape, dtype=dtype).copy_(mapped)

    def _open(self, path: Path) -> Any:
        """The file, mapped anew from time to time: pages that were read count as this process's memory until then."""
        if self._file is None or self._file[0] != path or self._bytes > _MAPPED_BYTES:
            self._file = None
            self._file = path, safe_open(path, framework="pt")
            self._bytes = 0
        return self._file[1]


@dataclass
class EmptyModel:
    """A model on the meta device, and where its weights are.

    Attributes:
        causal: The transformers model; buffers have memory and their values, parameters have neither.
        files: Where weights are.
        dtype: Of the weights when they are there.
    """

    causal: Any
    files: WeightFiles
    dtype: torch.dtype
    _stored: dict[Tensor, str] = field(default_factory=dict)
    """Names in the files of the model's tensors."""
    _wanted: dict[str, str] = field(default_factory=dict)
    """By its name in the module that trains: the same, once `note_names` was called."""

    @contextmanager
    def with_stand_ins(self) -> Iterator[None]:
        """Parameters that take no room but seem to be on the CPU, inside the with-block.

        Adapters get the device of the layer that they are put beside, and are to have values from the start. Tied
        parameters stay tied; what the block says about being trained is kept.
        """
        stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.causal.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter not in stand_ins:
                    stand_ins[parameter] = nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
                if parameter is not None:
                    module._parameters[name] = stand_ins[parameter]
        originals = {stand_in: original for original, stand_in in stand_ins.items()}
        try:
            yield
        finally:
            for module in self.causal.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter in originals:
                        module._parameters[name] = originals[parameter].requires_grad_(parameter.requires_grad)

    def note_names(self, module: nn.Module) -> None:
        """Remember which tensor in the files each parameter of `module` is; before anything replaces parameters.

        Args:
            module: What contains the model, with adapters and other names around it.
        """
        self._wanted = {name: self._stored[tensor] for name, tensor in _tensors(module).items() if tensor in self._stored}

    @contextmanager
    def with_weight(self, layer: nn.Module) -> Iterator[None]:
        """`layer`, one of the model's, has its real weight inside the with-block; it is read whole."""
        empty = layer._parameters["weight"]
        assert empty is not None
        layer._parameters["weight"] = nn.Parameter(self.files.whole(self._stored[empty], self.dtype), requires_grad=False)
        try:
            yield
        finally:
            layer._parameters["weight"] = empty

    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Give every parameter that has none its memory and its values, of a sharded one this rank's rows.

        Args:
            module: The module of `note_names`, sharded since.
            device: Where weights go.
        """
        made: dict[int, nn.Parameter] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in _tensors(module).items():
            key = self._wanted.get(name)
            if key is None:
                continue
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(self.files.whole(key, tensor.dtype))
            elif tensor.is_meta:
                if id(tensor) not in made:
                    made[id(tensor)] = nn.Parameter(self._read(key, tensor, device), requires_grad=tensor.requires_grad)
                state[name] = made[id(tensor)]
        module.load_state_dict(state, strict=False, assign=True)  # FSDP is told of new parameters by this alone

    def _read(self, key: str, tensor: Tensor, device: torch.device) -> Tensor:
        if not isinstance(tensor, DTensor):
            return self.files.whole(key, self.dtype).to(device)
        start, length = _rows_of(tensor)
        local = self.files.rows(key, start, start + length, self.dtype).to(device)
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def empty_model(source: ModelSource, config: PretrainedConfig, dtype: torch.dtype) -> EmptyModel | None:
    """The model without weights; None when the files' tensors are not one by one the model's.

    Args:
        source: Where it is.
        config: Its configuration.
        dtype: Of the weights to come.

    Raises:
        ModelNotFound: A file is damaged.
        InvalidArguments: The model is of an unknown kind.
    """
    attention.register()
    with loading(source):
        files = WeightFiles.of(source)
        if files is None:
            return None
        with init_empty_weights(include_buffers=False):
            causal = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=False)
        causal.tie_weights()
        with contextlib.suppress(OSError):  # many models have none
            causal.generation_config = GenerationConfig.from_pretrained(source.name, local_files_only=source.without_network)
    stored = _match(causal, files)
    if stored is None or (dtype != torch.float32 and getattr(causal, "_keep_in_fp32_modules", None)):
        return None
    _tell_unused(source, causal, files.names() - set(stored.values()))
    return EmptyModel(causal.eval(), files, dtype, stored)


def _match(causal: nn.Module, files: WeightFiles) -> dict[Tensor, str] | None:
    """Each tensor's name in the files, one of its names where it is tied; None when one is not there, or of another shape."""
    names = files.names()
    tensors = _tensors(causal)
    found: dict[Tensor, str] = {}
    for name, tensor in tensors.items():
        if name in names and tensor.dim() > 0 and files.shape(name) == tuple(tensor.shape):
            found.setdefault(tensor, name)
    return found if all(tensor in found for tensor in tensors.values()) else None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones under each of theirs."""
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def _rows_of(tensor: DTensor) -> tuple[int, int]:
    """First row and number of rows that this rank holds; FSDP cuts the first dimension as torch.chunk does."""
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    start, length = 0, rows
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, placement
            size = -(-rows // mesh.size(dimension))
            start = min(rows, mesh.get_local_rank(dimension) * size)
            length = min(size, rows - start)
    assert tensor.to_local().shape[0] == length, (tensor.shape, tensor.placements)
    return start, length


def _tell_unused(source: ModelSource, causal: Any, unused: set[str]) -> None:
    known = [re.compile(pattern) for pattern in causal._keys_to_ignore_on_load_unexpected or []]
    if left := sorted(name for name in unused if not any(pattern.search(name) for pattern in known)):
        _log.warning("weights of %s that the model has no use for are left out: %s", source.name, ", ".join(left[:10]))


def _file(source: ModelSource, name: str) -> Path | None:
    """Path of one of the model's files, fetched from the hub if need be; None = it has no such file."""
    found = cached_file(source.name, name, local_files_only=source.without_network, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
