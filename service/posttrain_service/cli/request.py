"""A job request out of a file: either the request itself, or a train profile as trainers have it.

A profile names paths on the user's machine. Its data files are uploaded, its model becomes a name on the server or a
hub id, and its output paths are the server's business; each such change is said in a line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.knobs import OWNED_PATHS
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

_SECTIONS = ("train_args", "torch_args", "train", "torchrun")


@dataclass
class Read:
    """What a file asks for."""

    request: dict[str, Any]
    """Body of the request, without the files that are still to be uploaded."""
    uploads: dict[str, Path] = field(default_factory=dict)
    """Field of the request -> local file whose id belongs there."""
    notes: list[str] = field(default_factory=list)
    """What was changed, for the user."""


def read_request(path: Path) -> Read:
    """Read a request or a profile.

    Raises:
        InvalidRequest: It is neither.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2020-13-45, bytes that are no UTF-8
        raise InvalidRequest(f"{path} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds no mapping of names to values")
    _refuse_what_json_lacks(path, content)
    if "model" in content or "dataset" in content:
        return Read(content)
    return _profile(path, _flat(content))


def _refuse_what_json_lacks(path: Path, value: Any, place: str = "") -> None:
    """YAML has dates, bytes, sets and keys of any type; a request is JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidRequest(f"{path}: the name {key!r} in {place or 'the file'} is no text; put it in quotes")
            _refuse_what_json_lacks(path, inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _refuse_what_json_lacks(path, inner, f"{place}.{number}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path}: {place} is {value}, which is no number that JSON has")
    elif value is not None and not isinstance(value, str | int | float):
        raise InvalidRequest(
            f"{path}: {place} is a {type(value).__name__} ({value}), which JSON does not have; put it in quotes"
        )


def with_settings(request: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The request with `a.b=value` settings applied; a value is JSON where it is valid JSON, else text.

    Raises:
        InvalidRequest: A setting has no `=`, or leads through something that isn't a mapping.
    """
    changed: dict[str, Any] = json.loads(json.dumps(request))
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--set {setting!r}: write it as NAME=VALUE")
        *parents, last = name.split(".")
        place = changed
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise InvalidRequest(f"--set {setting!r}: {parent} is not a mapping")
        place[last] = _value(text)
    return changed


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """A profile's arguments without the sections they may stand in."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        inner = value if name in _SECTIONS and isinstance(value, dict) else {name: value}
        for key in inner.keys() & flat.keys():
            raise InvalidRequest(f"the profile gives {key} twice")
        flat |= inner
    return flat


def _profile(path: Path, flat: dict[str, Any]) -> Read:
    train, launch = FullTrainingArguments.model_fields, TorchrunArguments.model_fields
    unknown = [name for name in flat if name not in train and name not in launch]
    if unknown or "model_path" not in flat or "data_path" not in flat:
        what = (
            f"it has unknown names: {', '.join(map(str, unknown))}" if unknown else "it lacks model_path or data_path"
        )
        raise InvalidRequest(f"{path} is neither a job request (model, dataset) nor a train profile: {what}")
    model = str(flat["model_path"])
    read = Read({"model": Path(model).name if Path(model).is_dir() else model})
    if read.request["model"] != model:
        read.notes.append(f"model_path {model} becomes the server's model {read.request['model']!r}")
    for field_name, argument in (("dataset", "data_path"), ("validation_dataset", "validation_data_path")):
        if flat.get(argument) is not None:
            read.uploads[field_name] = _local(path, argument, flat[argument])
    for name in ("ckpt_output_dir", "data_output_dir"):
        if flat.get(name) is not None:
            read.notes.append(f"{name} {flat[name]} is left out: the server decides where the run's files are")
    read.request["training"] = {n: v for n, v in flat.items() if n in train and n not in OWNED_PATHS}
    read.request["torchrun"] = _one_host(flat, read.notes)
    return read


def _local(profile: Path, argument: str, value: Any) -> Path:
    """A data file of a profile: relative to the profile, or to where the command runs."""
    for candidate in (Path(str(value)), profile.parent / str(value)):
        if candidate.is_file():
            return candidate
    raise InvalidRequest(f"{argument} {value} is not a file on this machine")


def _one_host(flat: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Torchrun's arguments; those of the rendezvous are left out of a profile for one node, since they do nothing there."""
    launch = {name: value for name, value in flat.items() if name in TorchrunArguments.model_fields}
    if str(launch.get("nnodes") or 1).strip() == "1":  # anything that is no number is for the server to refuse
        for name in ("rdzv_id", "rdzv_endpoint", "master_addr", "master_port"):
            if launch.pop(name, None) is not None:
                notes.append(f"{name} is left out: a run on one node has a private rendezvous")
    return launch
