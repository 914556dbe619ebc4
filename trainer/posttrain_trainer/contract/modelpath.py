"""What a model path can be: a folder, or an id on the Hugging Face hub. What is neither is told before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def neither_here_nor_on_a_hub(model_path: str) -> str | None:
    """Why there can be no such model, in a sentence; None when something is there, or it may be the hub's."""
    path = Path(model_path).expanduser()
    if path.exists() or (_HUB_ID.fullmatch(model_path) is not None and ".." not in model_path):
        return None
    return f"model {model_path} does not exist: there is no folder {path.absolute()}, and an id on the Hugging Face hub is owner/name"
