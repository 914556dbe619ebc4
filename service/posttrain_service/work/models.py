"""From the model a request names to what the trainer loads: a folder under models/, or a hub id.

A path is code (custom model files), so nothing outside the models folder can be named, and no symlink may lead out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain_service.errors import InvalidRequest

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
DEFAULT_SEQ_LEN = 4096


@dataclass(frozen=True)
class Model:
    """A model that a job may start from."""

    name: str
    """As the request has it."""
    location: str
    """What the trainer is given as model_path: an absolute folder, or the hub id."""
    local: bool
    """Whether it is a folder on this machine."""
    size_bytes: int | None = None
    """Bytes of its weight files; None for a hub id."""
    max_positions: int | None = None
    """Longest sequence by its config; None where unknown."""


def find(name: str, models_dir: Path) -> Model:
    """The model that `name` stands for.

    Raises:
        InvalidRequest: There is no such folder and the name is no hub id, or the folder is not a model that may be used.
    """
    folder = models_dir / name
    if is_plain(name) and folder.is_dir():
        return at(name, folder, models_dir)
    if _HUB_ID.fullmatch(name) and ".." not in name:
        return Model(name, name, local=False)
    raise InvalidRequest(
        f"there is no model {name!r}: {_known(models_dir)}; a model on the Hugging Face hub is named organisation/name",
        param="model",
    )


def names(models_dir: Path) -> list[str]:
    """Names of the folders under `models_dir` that hold a model."""
    if not models_dir.is_dir():
        return []
    found = (path.parent.relative_to(models_dir) for path in _configs(models_dir))
    return sorted(str(path) for path in found)


def _configs(models_dir: Path) -> list[Path]:
    return [*models_dir.glob("*/config.json"), *models_dir.glob("*/*/config.json")]


def is_plain(name: str) -> bool:
    """Whether the name is that of a folder right under the models folder, or one further down."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and not part.startswith(".") and "\\" not in part for part in parts)


def at(name: str, folder: Path, root: Path) -> Model:
    """The model in a folder somewhere below `root`, which no symlink of it may lead out of.

    Raises:
        InvalidRequest: One does, or what is there isn't in Hugging Face layout.
    """
    root = root.resolve()
    resolved = folder.resolve()
    if not resolved.is_relative_to(root) or resolved == root:
        raise InvalidRequest(f"model {name!r} leads out of the models folder by a symlink; copy it there", param="model")
    size_bytes = 0
    for path in resolved.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise InvalidRequest(
                f"model {name!r}: {path.relative_to(resolved)} leads out of the models folder by a symlink; copy the file there",
                param="model",
            )
        if path.suffix == ".safetensors":
            size_bytes += path.stat().st_size
    return Model(name, str(resolved), local=True, size_bytes=size_bytes, max_positions=_max_positions(name, resolved))


def _max_positions(name: str, folder: Path) -> int | None:
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidRequest(f"model {name!r} has no config.json, so it is not in Hugging Face layout", param="model")
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"model {name!r}: config.json is not JSON ({error})", param="model") from error
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return value if isinstance(value, int) and value > 0 else None


def _known(models_dir: Path) -> str:
    known = names(models_dir)
    return f"the models folder has {', '.join(known[:20])}" if known else "the models folder is empty"
