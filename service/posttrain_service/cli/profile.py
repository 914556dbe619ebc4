"""Train profiles: YAML with `train_args:` and `torch_args:`; what a profile, flags and defaults come to together.

Values may be text where a number is meant: YAML 1.1 reads `2e-6` as text, and flags are text anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.suggest import NO_FIELD, nearest
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

SECTIONS: dict[str, type[BaseModel]] = {"train_args": FullTrainingArguments, "torch_args": TorchrunArguments}
_OTHER_NAMES = {"train": "train_args", "torchrun": "torch_args"}
PRESETS = Path(__file__).parent / "profiles"

Given = dict[str, dict[str, Any]]
"""Values by section."""


@dataclass(frozen=True)
class Resolved:
    """The arguments of a run, and where each of their values is from."""

    train_args: FullTrainingArguments
    torch_args: TorchrunArguments
    sources: dict[str, str]
    """`train_args.lora.rank` and the like -> flag, profile or default."""


def read_profile(path: Path) -> Given:
    """The values of a profile by section; a profile without sections is told apart by its names.

    Raises:
        InvalidRequest: It is not YAML, no mapping, or has a name that no argument has.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds no mapping of names to values")
    given: Given = {name: {} for name in SECTIONS}
    for name, value in content.items():
        section = _OTHER_NAMES.get(name, name)
        if section in SECTIONS:
            if not isinstance(value, dict | None):
                raise InvalidRequest(f"{path}: {name} holds no mapping of names to values")
            inner, home = value or {}, section
        else:
            homes = [place for place, model in SECTIONS.items() if name in model.model_fields]
            if not homes:
                raise InvalidRequest(f"{path}: there is no argument {name!r}{_meant(str(name))}")
            inner, home = {name: value}, homes[0]
        if twice := inner.keys() & given[home].keys():
            raise InvalidRequest(f"{path} gives {', '.join(sorted(twice))} twice")
        given[home] |= inner
    return given


def resolve(profile: Given, flags: Given) -> Resolved:
    """Flags over the profile over the defaults.

    Raises:
        InvalidRequest: A value is out of bounds, unknown, missing, or they contradict each other; each fault with its name.
    """
    made: dict[str, Any] = {}
    faults: list[dict[str, Any]] = []
    sources: dict[str, str] = {}
    for section, model in SECTIONS.items():
        merged = _merge(profile.get(section, {}), flags.get(section, {}))
        named = dict.fromkeys(_leaves(profile.get(section, {})), "profile") | dict.fromkeys(_leaves(flags.get(section, {})), "flag")
        try:
            value = model.model_validate(merged)
        except ValidationError as error:
            faults += [_fault(item, named, model) for item in error.errors()]
            continue
        made[section] = value.resolved() if isinstance(value, FullTrainingArguments) else value
        for leaf in _leaves(made[section].model_dump(mode="json")):
            sources[f"{section}.{leaf}"] = next((named[name] for name in _upwards(leaf) if name in named), "default")
    if faults:
        raise InvalidRequest("the arguments of the run are not valid", errors=faults)
    return Resolved(made["train_args"], made["torch_args"], sources)


def as_profile(resolved: Resolved) -> str:
    """A profile that says the same, with the source of each value beside it."""
    lines = []
    for section, value in (("train_args", resolved.train_args), ("torch_args", resolved.torch_args)):
        lines.append(f"{section}:")
        lines += _lines(value.model_dump(mode="json"), resolved.sources, f"{section}.", "  ")
    return "\n".join(lines) + "\n"


def template(given: Given) -> str:
    """A profile with the given values, and every other argument with its default and its sentence as a comment."""
    lines = []
    for section, model in SECTIONS.items():
        lines.append(f"{section}:")
        schema = model.model_json_schema()["properties"]
        for name, info in model.model_fields.items():
            lines.append(f"  # {info.description}")
            if name in given[section]:
                lines += _lines({name: _typed(info, given[section][name])}, {}, "", "  ")
            elif info.is_required():
                lines.append(f'  {name}: ""  # to be filled in')
            else:
                lines.append(f"  # {name}: {_scalar(schema[name].get('default'))}")
    return "\n".join(lines) + "\n"


def _typed(info: FieldInfo, value: Any) -> Any:
    """A profile's value as its argument has it: YAML reads 2e-5 as text, and it is a number nevertheless."""
    try:
        made = TypeAdapter[Any](Annotated[info.annotation, info]).validate_python(value)  # type: ignore[arg-type]
    except ValidationError:
        return value  # as it stands, for `config init` on the file to refuse
    return made if isinstance(made, int | float) else value


def _scalar(value: Any) -> str:
    """A value as YAML reads it back: a number with an exponent needs a point."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def presets() -> list[str]:
    """Names of the profiles that are shipped."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _upwards(leaf: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`: a value may have been given as part of a whole."""
    parts = leaf.split(".")
    for count in range(len(parts), 0, -1):
        yield ".".join(parts[:count])


def _meant(name: str) -> str:
    found = next((like for model in SECTIONS.values() if (like := nearest(model, name)) is not None), None)
    return "" if found is None else f"; did you mean {found}?"


def _fault(item: Any, named: Mapping[str, str], model: type[BaseModel]) -> dict[str, Any]:
    name = ".".join(str(part) for part in item["loc"]) or "together"
    source = next((named[part] for part in _upwards(name) if part in named), None)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        like = nearest(model, name)
        message = f"{NO_FIELD}; " + ("check the spelling, or leave it out" if like is None else f"did you mean {like}?")
    return {"loc": f"{name} ({source})" if source else name, "message": message}


def _lines(values: Mapping[str, Any], sources: Mapping[str, str], prefix: str, indent: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, sources, f"{prefix}{name}.", indent + "  ")
        else:
            source = sources.get(f"{prefix}{name}")
            yield f"{indent}{name}: {_scalar(value)}" + (f"  # {source}" if source else "")
