"""What all models of arguments and requests share: true and false are no numbers, and contradictions name their fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_FIELD = re.compile(r"\{([a-z_0-9.]+)\}")
_NUMBERS = frozenset({"int", "float"})
_NO_SCHEMAS = frozenset({"metadata", "default", "serialization", "function", "expected"})
"""Keys of a core schema that hold no further schemas of what is validated."""
_MODELS = frozenset({"model", "dataclass", "definition-ref"})


class Disagreement(ValueError):
    """Values that contradict each other, found by a validator of a whole model.

    Its fields stand in the text as `{name}`, relative to that model, so that whoever shows the error can name them as
    the reader knows them. The first one is the field at fault.

    Args:
        text: The sentence.
        values: What stands for the other `{name}` of the text.
    """

    def __init__(self, text: str, **values: Any) -> None:
        self.text = text
        self.values = values
        super().__init__(self.told(lambda name: name))

    @property
    def fields(self) -> list[str]:
        """The fields that the text names, in its order."""
        return [name for name in _FIELD.findall(self.text) if name not in self.values]

    def told(self, name_of: Callable[[str], str]) -> str:
        """The sentence with its fields named by `name_of`."""
        return _FIELD.sub(lambda found: str(self.values[found[1]] if found[1] in self.values else name_of(found[1])), self.text)


def _guarded(node: Any, owner: type[BaseModel]) -> Any:
    """A part of a core schema with every number in it guarded; other models guard themselves."""
    if isinstance(node, list | tuple):
        return type(node)(_guarded(item, owner) for item in node)
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if not isinstance(kind, str):  # fields or choices by their names
        return {key: _guarded(item, owner) for key, item in node.items()}
    foreign = kind in _MODELS and node.get("cls") is not owner
    if foreign or (kind == "function-before" and node["function"]["function"] is _no_boolean):
        return node
    if kind in _NUMBERS:
        return core_schema.no_info_before_validator_function(_no_boolean, node)
    return {key: item if key in _NO_SCHEMAS else _guarded(item, owner) for key, item in node.items()}


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


class Model(BaseModel):
    """Base of models that take numbers as numbers or text, but never true or false, which are no numbers in JSON or YAML."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema in which each number, however deep in a union or list, refuses booleans."""
        schema: CoreSchema = _guarded(handler(source), cls)
        return schema
