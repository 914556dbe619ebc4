"""Takes the server's own paths out of what the trainer says, before it is stored and shown to clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain_service.domain.job import NewEvent
from posttrain_service.settings import Settings
from posttrain_trainer.contract.rundir import RunDir


class Redactor:
    """Makes paths relative: to the run's folder, else to the storage directory.

    Args:
        settings: Name the folders.
    """

    def __init__(self, settings: Settings) -> None:
        self._storage = settings.storage_dir
        self._models = settings.base_models_dir

    def text(self, text: str, run_dir: RunDir) -> str:
        """The text with every path of ours made relative."""
        # The deepest folder first, or its prefix would be cut off alone.
        pairs = {str(run_dir.path): "", str(self._models): "models/", str(self._storage): ""}
        for folder, shown in pairs.items():
            text = text.replace(f"{folder}/", shown)
        return text

    def event(self, event: NewEvent, run_dir: RunDir) -> NewEvent:
        """The event with its message and data made so."""
        return replace(event, message=self.text(event.message, run_dir), data=self.value(event.data, run_dir))

    def value(self, value: Any, run_dir: RunDir) -> Any:
        """The same for every text inside a JSON-like value."""
        if isinstance(value, str):
            return self.text(value, run_dir)
        if isinstance(value, dict):
            return {key: self.value(item, run_dir) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, run_dir) for item in value]
        return value
