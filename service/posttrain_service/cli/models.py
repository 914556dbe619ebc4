"""`posttrain models ...`: what jobs may start from; adding needs the machine that has the folder."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Annotated

import typer

from posttrain_service.cli.common import (
    DEFAULT_SERVER,
    JsonOption,
    KeyFileOption,
    ServerOption,
    connected,
    sentences,
    show_json,
    show_table,
)
from posttrain_service.cli.db import StorageOption
from posttrain_service.cli.serve import read_settings
from posttrain_service.errors import Conflict, InvalidRequest
from posttrain_service.launch.tools import run_tool
from posttrain_service.settings import Settings
from posttrain_service.work import models

app = typer.Typer(help="Models that jobs start from, and that they make.", no_args_is_help=True)

_CONVERT_TIMEOUT_S = 24 * 3600.0  # somebody waits and can end it
_TAKEN = frozenset({".safetensors", ".json", ".txt", ".model", ".jinja", ".md"})
"""Endings of the files that are copied: weights as safetensors, and text. No pickles, no code."""


@app.command("list")
def list_(as_json: JsonOption = False, server: ServerOption = DEFAULT_SERVER, key_file: KeyFileOption = None) -> None:
    """List base models, and what jobs have made; each id may be a further job's model."""
    with connected(server, key_file) as client:
        found = list(client.models())
    if as_json:
        show_json(found)
        return
    show_table(("ID", "KIND", "OWNED BY"), ((model["id"], model.get("kind"), model["owned_by"]) for model in found))


@app.command("rm")
def remove(
    model: Annotated[str, typer.Argument(metavar="ID", help="ft:..., with :ckpt-step-N for one checkpoint of it.")],
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Remove what a job has made; the job's record stays."""
    with connected(server, key_file) as client:
        client.delete_model(model)
        if as_json:
            show_json({"id": model, "deleted": True})


@app.command()
def add(
    source: Annotated[Path, typer.Argument(help="Folder in Hugging Face layout, or a GGUF file, on this machine.", exists=True)],
    name: Annotated[str | None, typer.Option(help="Name for jobs to use; that of the folder or file unless told.")] = None,
    as_json: JsonOption = False,
    storage_dir: StorageOption = None,
) -> None:
    """Put a model into the server's models folder, on the machine that has it. A GGUF file is converted."""
    with sentences():
        settings = read_settings({} if storage_dir is None else {"storage_dir": str(storage_dir)})
        chosen = name or (source.stem if source.is_file() else source.resolve().name)
        target = settings.base_models_dir / chosen
        if not models.is_plain(chosen):
            raise InvalidRequest(f"{chosen!r} is no name for a model: at most one /, and no part that begins with a dot")
        if target.exists():
            raise Conflict(f"there is a model {chosen!r} already, in {target}; give another --name")
        target.parent.mkdir(parents=True, exist_ok=True)
        if (source / "config.json").is_file():
            _copy(source, target)
        else:
            payload = {"source": str(source.absolute()), "target": str(target)}
            run_tool(settings.trainer_python, "convert", payload, _CONVERT_TIMEOUT_S)
        _show(chosen, target, settings, as_json=as_json)


def _copy(source: Path, target: Path) -> None:
    """The files that a model consists of, under its name all at once."""
    files = sorted(path for path in source.iterdir() if path.is_file() and path.suffix in _TAKEN)
    if not any(path.suffix == ".safetensors" for path in files):
        raise InvalidRequest(f"{source} has no safetensors; weights in another format are not taken")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        for path in files:
            shutil.copyfile(path, partial / path.name)  # what a link leads to, as the hub's cache has it
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _show(name: str, target: Path, settings: Settings, *, as_json: bool) -> None:
    found = models.at(name, target, settings.base_models_dir)
    if as_json:
        show_json({"id": name, "path": found.location, "size_bytes": found.size_bytes})
    else:
        print(name)
