"""One flag for each argument of a run: `--learning-rate`, `--lora.rank`, `--is-padding-free / --no-is-padding-free`."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from posttrain_service.cli.profile import SECTIONS, Given


@dataclass(frozen=True)
class Flag:
    """An argument as a flag."""

    section: str
    path: tuple[str, ...]
    """Names that lead to it."""
    info: FieldInfo

    @property
    def key(self) -> str:
        """Its name as a parameter of a function."""
        return "__".join(self.path)

    @property
    def option(self) -> str:
        """Its name on the command line, without dashes in front."""
        return ".".join(self.path).replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether it is given without a value."""
        return self.info.annotation is bool

    def read(self, text: str | bool) -> Any:
        """What the argument's model is given; it makes numbers out of text itself.

        A list may be written with commas, a whole object as JSON, and `none` is no value.
        """
        if isinstance(text, bool):
            return text
        if text in ("none", "null"):
            return None
        if text[:1] in ("[", "{"):
            return json.loads(text)
        if any(get_origin(part) is tuple for part in _parts(self.info.annotation)):
            words = [word.strip() for word in text.split(",") if word.strip()]
            return [{"kind": word} for word in words] if self.path == ("loggers",) else words
        return text


def flags() -> list[Flag]:
    """Every argument of `train_args` and `torch_args`, those of objects inside them after the object itself."""
    found: dict[str, Flag] = {}
    for section, model in SECTIONS.items():
        for flag in _flags(section, model, ()):
            found.setdefault(flag.key, flag)  # the methods share `kind`
    return list(found.values())


def with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give the function, which takes the rest as keywords, an option for every flag; those not used are None."""
    known = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = []
    for flag in flags():
        names = [f"--{flag.option}/--no-{flag.option}"] if flag.is_switch else [f"--{flag.option}"]
        kind: Any = bool | None if flag.is_switch else str | None
        help_ = (flag.info.description or "").replace("\n", " ")
        option = typer.Option(*names, help=help_, show_default=False, metavar=None if flag.is_switch else "VALUE")
        added.append(inspect.Parameter(flag.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]))
    function.__signature__ = inspect.Signature([*known, *added])  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in (*known, *added)}
    return function


def given_flags(values: dict[str, Any]) -> Given:
    """The values of the flags that were used, by section.

    Raises:
        ValueError: A value that begins like JSON is none.
    """
    given: Given = {name: {} for name in SECTIONS}
    for flag in flags():
        if values.get(flag.key) is None:
            continue
        try:
            value = flag.read(values[flag.key])
        except ValueError as error:
            raise ValueError(f"--{flag.option}: the value is no JSON: {error}") from error
        place = given[flag.section]
        for name in flag.path[:-1]:
            inner = place.get(name)
            place[name] = place = inner if isinstance(inner, dict) else {}
        place[flag.path[-1]] = value
    return given


def _flags(section: str, model: type[BaseModel], above: tuple[str, ...]) -> Iterator[Flag]:
    for name, info in model.model_fields.items():
        yield Flag(section, (*above, name), info)
        for part in _parts(info.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _flags(section, part, (*above, name))


def _parts(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation
