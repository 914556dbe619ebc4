"""Where a model comes from: a local folder, or an id on the Hugging Face hub. A local name never touches the network."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer

from posttrain_trainer.contract.errors import InvalidArguments, ModelNotFound
from posttrain_trainer.contract.modelpath import neither_here_nor_on_a_hub
from posttrain_trainer.models.hub import is_only_cached, one_line


@dataclass(frozen=True)
class ModelSource:
    """What `from_pretrained` is given."""

    name: str
    """Absolute folder, or hub id."""
    local: bool
    """A folder here."""
    cached: bool = False
    """To be taken from the hub's cache on this machine, without asking the hub."""

    def options(self) -> dict[str, Any]:
        """Keywords for every `from_pretrained`: never code from the repository, no network where none is needed."""
        return {"trust_remote_code": False, "local_files_only": self.without_network}

    @property
    def without_network(self) -> bool:
        """Whether everything is on this machine."""
        return self.local or self.cached


def find_model(model_path: str) -> ModelSource:
    """Resolve a model path.

    Raises:
        ModelNotFound: Nothing is there, or what is there is no model in Hugging Face layout, or the hub, asked once for
            some seconds, did not have it.
    """
    path = Path(model_path).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(str(path.resolve()), local=True)
        if (path / "adapter_config.json").is_file():
            base = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
            raise ModelNotFound(f"{path} is an adapter of {base}; name that model, or merge the adapter first")
        if any(path.glob("*.gguf")):
            raise ModelNotFound(f"{path} holds a GGUF file; convert it to safetensors first")
        raise ModelNotFound(f"{path} has no config.json; it is no model in Hugging Face layout")
    if path.exists():
        raise ModelNotFound(f"{path} is a file; a model is a folder in Hugging Face layout (convert GGUF files first)")
    if (refusal := neither_here_nor_on_a_hub(model_path)) is not None:
        raise ModelNotFound(refusal)
    return ModelSource(model_path, local=False, cached=is_only_cached(model_path))


def read_tokenizer(source: ModelSource, **options: Any) -> Any:
    """The tokenizer as it is in the source.

    Raises:
        ModelNotFound: None there.
    """
    with loading(source):
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.options(), **options)
    # Otherwise a copy would carry how this one was loaded.
    for name in ("local_files_only", "is_local"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


@contextmanager
def loading(source: ModelSource) -> Iterator[None]:
    """Turn the loader's errors into ours, naming the model."""
    try:
        yield
    except SafetensorError as error:
        raise ModelNotFound(f"the weights of {source.name} are damaged or cut short: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        hint = "" if source.local else "; it is no folder here, and the Hugging Face hub did not give it"
        raise ModelNotFound(f"model {source.name} cannot be loaded{hint}: {one_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise InvalidArguments(f"model {source.name} is of a kind that cannot be loaded: {one_line(error)}") from error
