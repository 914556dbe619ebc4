"""What identifies a model's weights, without loading them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from posttrain_trainer.models.load import load_config
from posttrain_trainer.models.source import find_model


def weights_fingerprint(model_path: str) -> str:
    """SHA-256 over configuration and weights of a local model; for one of the hub, its commit.

    Raises:
        ModelNotFound: No model there.
    """
    source = find_model(model_path)
    if not source.local:
        commit = getattr(load_config(source), "_commit_hash", None)
        return f"{source.name}@{commit}"
    content = hashlib.sha256()
    for path in sorted([Path(source.name) / "config.json", *Path(source.name).glob("*.safetensors")]):
        with path.open("rb") as file:
            content.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return content.hexdigest()
