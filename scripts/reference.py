"""Write docs/reference/ from the code: settings, arguments, job request, command line, routes, Python. `--check` only compares."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel

from posttrain_service import client
from posttrain_service.cli.main import app
from posttrain_service.settings import ENV_PREFIX, Settings
from posttrain_service.wire.jobs import JobRequest
from posttrain_trainer import train_torchrun
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Made by scripts/reference.py (make docs); change the code, not this file. -->\n"
OF_THE_MACHINE = {
    "storage_dir": "the user's data folder + `/posttrain`",
    "trainer_python": "the interpreter that runs the service",
}
"""Defaults that differ from machine to machine."""
ELSEWHERE = {"TrainingKnobs": "training-arguments.md", "TorchrunKnobs": "training-arguments.md#torchrun-arguments"}
"""Parts of the job request that have a page of their own."""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def pages() -> dict[str, str]:
    """File name -> content."""
    return {
        "settings.md": settings(),
        "training-arguments.md": arguments(),
        "job-request.md": models("Job request", "The body of `POST /post_training/jobs`.", JobRequest, ELSEWHERE),
        "command-line.md": command_line(),
        "http-api.md": http_api(yaml.safe_load((ROOT / "openapi.yaml").read_text(encoding="utf-8"))),
        "python.md": python(),
    }


def settings() -> str:
    """All settings of the service."""
    schema = Settings.model_json_schema()
    rows = [("variable", "flag of `posttrain serve`", "type", "default", "meaning"), ("---",) * 5]
    for name, field in schema["properties"].items():
        flag = "--" + name.replace("_", "-")
        default = OF_THE_MACHINE.get(name) or default_of(field)
        rows.append((f"`{ENV_PREFIX}{name.upper()}`", f"`{flag}`", type_of(field), default, text_of(field)))
    client = [
        ("variable", "meaning"),
        ("---", "---"),
        ("`POSTTRAIN_SERVER`", "Address of the service that the command line talks to, instead of `http://127.0.0.1:8484`."),
        ("`POSTTRAIN_API_KEY`", "Sent by the command line as bearer token."),
        ("`POSTTRAIN_API_KEY_FILE`", "File with the key, which only its owner may read; goes before `POSTTRAIN_API_KEY`."),
    ]
    intro = "A flag wins over the variable, the variable over the default. Unknown `POSTTRAIN_*` variables are told at start."
    return f"{NOTE}# Settings\n\n{intro}\n\n{table(rows)}\n\nFor the command line as a client:\n\n{table(client)}\n"


def arguments() -> str:
    """All arguments of a run."""
    training = models(
        "Training arguments",
        "`FullTrainingArguments` of `posttrain_trainer`; in a job request these are the keys of `training`, without the paths.",
        FullTrainingArguments,
    )
    torchrun = models("torchrun arguments", "`TorchrunArguments`; in a job request, the keys of `torchrun`.", TorchrunArguments)
    return training + "\n" + torchrun.removeprefix(NOTE)


def models(title: str, intro: str, model: type[BaseModel], elsewhere: dict[str, str] | None = None) -> str:
    """A model's fields as a table, and those of the models it is made of but for those that are described elsewhere."""
    links = elsewhere or {}
    schema = model.model_json_schema()
    inner = schema.get("$defs", {})
    parts = [f"{NOTE}# {title}\n\n{intro}\n\n{fields(schema, inner, links)}"]
    reached = reachable(schema, inner, links)
    for name in sorted(reached):
        part = inner[name]
        if part.get("properties"):
            parts.append(f"## {name}\n\n{part.get('description', '')}\n\n{fields(part, inner, links)}")
        else:
            parts.append(f"## {name}\n\n{part.get('description', '')}\n\n{type_of(part, links)}")
    return "\n\n".join(parts) + "\n"


def reachable(schema: dict[str, Any], inner: dict[str, Any], links: dict[str, str]) -> set[str]:
    """Names of the parts that are referred to, without what only the parts described elsewhere refer to."""
    found: set[str] = set()
    waiting = [schema.get("properties", {})]
    while waiting:
        for name in set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(waiting.pop()))) - found - set(links):
            found.add(name)
            waiting.append(inner[name])
    return found


def fields(schema: dict[str, Any], inner: dict[str, Any], links: dict[str, str]) -> str:
    """The table of one object's fields."""
    required = set(schema.get("required", ()))
    rows = [("name", "type", "default", "meaning"), ("---",) * 4]
    for name, field in schema["properties"].items():
        default = "**required**" if name in required else default_of(field)
        meaning = text_of(field) or text_of(inner.get(field.get("$ref", "").rsplit("/", 1)[-1], {}))
        rows.append((f"`{name}`", type_of(field, links), default, meaning))
    return table(rows)


def type_of(field: dict[str, Any], links: dict[str, str] | None = None) -> str:
    """The type in words and bounds."""
    if "anyOf" in field or "oneOf" in field:
        kinds = [type_of(option, links) for option in field.get("anyOf") or field["oneOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}]({(links or {}).get(name) or '#' + name.lower()})"
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "prefixItems" in field:
        return "(" + ", ".join(type_of(item, links) for item in field["prefixItems"]) + ")"
    if field.get("type") == "array":
        return f"list of {type_of(field['items'], links)}"
    bounds = [f"{sign} {field[key]:,}" for key, sign in BOUNDS.items() if key in field]
    kind = field.get("type", "any")
    return " ".join([kind if isinstance(kind, str) else " or ".join(kind), ", ".join(bounds)]).strip()


def default_of(field: dict[str, Any]) -> str:
    """The default as JSON; nothing where the empty value is one."""
    if field.get("default") is None:
        return "none"
    if isinstance(field["default"], dict) and "$ref" in field:
        return "its defaults"
    return f"`{json.dumps(field['default'])}`" if field["default"] not in ([], {}, "") else "empty"


def text_of(field: dict[str, Any]) -> str:
    """The sentence under the field."""
    return str(field.get("description", "")).replace("\n", " ")


def table(rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def command_line() -> str:
    """Every command with its arguments and options."""
    parts = [f"{NOTE}# Command line"]
    for path, command in commands(typer.main.get_command(app), "posttrain"):
        rows = [("option", "default", "meaning"), ("---",) * 3]
        settings_too = path == "posttrain serve"
        for parameter in command.params:
            if parameter.name == "help" or (settings_too and parameter.name in Settings.model_fields):
                continue
            names = " ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                names = f"`{parameter.metavar or parameter.name.upper()}`"
            rows.append((names, option_default(parameter), str(getattr(parameter, "help", "") or "").replace("\n", " ")))
        body = f"## `{path}`\n\n{(command.help or '').strip()}"
        if settings_too:
            body += " They are listed under [settings](settings.md)."
        parts.append(body + (f"\n\n{table(rows)}" if len(rows) > 2 else ""))
    return "\n\n".join(parts) + "\n"


def option_default(parameter: Any) -> str:
    """The default of an option, unless it is decided by the machine or the environment."""
    if parameter.name in OF_THE_MACHINE or parameter.default is None or callable(parameter.default):
        return "none"
    return "**required**" if parameter.required else f"`{parameter.default}`"


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """All commands of the tree that do something, depth first."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name in inner:
        if not inner[name].hidden:
            yield from commands(inner[name], f"{path} {name}")


def http_api(spec: dict[str, Any]) -> str:
    """Every route with its parameters, by tag, and every field of what is sent and answered."""
    inner = spec["components"]["schemas"]
    by_tag: dict[str, list[str]] = {}
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append(route(method.upper(), path, operation, inner))
    intro = (
        "Made from `openapi.yaml`, which the service also gives at `/openapi.json`. Errors come in one envelope: "
        "`{\"error\": {\"message\", \"type\", \"param\", \"code\"}}`; an unknown field is an error, never ignored."
    )
    parts = [f"{NOTE}# HTTP API\n\n{intro}", *(f"## {tag}\n\n" + "\n\n".join(routes) for tag, routes in by_tag.items())]
    objects = [
        f"### {name}\n\n{text_of(inner[name])}\n\n"
        + (fields(inner[name], inner, {}) if inner[name].get("properties") else type_of(inner[name]))
        for name in sorted(inner)
    ]
    return "\n\n".join([*parts, "## Objects", *objects]) + "\n"


def route(method: str, path: str, operation: dict[str, Any], inner: dict[str, Any]) -> str:
    """One route: what it does, takes and gives."""
    parts = [f"### `{method} {path}`\n\n{text_of(operation)}"]
    rows = [("parameter", "in", "type", "meaning"), ("---",) * 4]
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path" and not text_of(parameter):
            continue  # its name in the path says it
        rows.append((f"`{parameter['name']}`", parameter["in"], type_of(parameter["schema"]), text_of(parameter)))
    if len(rows) > 2:
        parts.append(table(rows))
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"Takes `{kind}`: {type_of(body.get('schema', {}))}.")
    for status, response in operation["responses"].items():
        for kind, body in response.get("content", {}).items():
            if status.startswith("2"):
                parts.append(f"{status}, `{kind}`: {type_of(body.get('schema', {}))}.")
    return "\n\n".join(parts)


def python() -> str:
    """The client's and the trainer library's public functions: signatures and docstrings."""
    parts = [
        f"{NOTE}# Python",
        "## The trainer\n\n`from posttrain_trainer import FullTrainingArguments, TorchrunArguments, train_torchrun`; "
        "the arguments are described under [training arguments](training-arguments.md).",
        signature("train_torchrun", train_torchrun),
    ]
    for kind in (client.Client, client.AsyncClient, client.ServerEvent, client.ApiError, client.ServerGone):
        parts.append(f"## {kind.__name__}\n\n`from posttrain_service.client import {kind.__name__}`\n\n{documented(kind)}")
        if kind is client.Client:
            parts += [signature(method, function) for method, function in public(kind)]
    return "\n\n".join(parts) + "\n"


def public(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods that a caller may use, in the order of the source, inherited ones last."""
    seen: set[str] = set()
    for owner in kind.__mro__[:-1]:
        for name, function in vars(owner).items():
            if inspect.isfunction(function) and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, function


def signature(name: str, function: Any) -> str:
    """One function: how it is called, and its docstring."""
    call = "async " if inspect.iscoroutinefunction(function) else ""
    whole = inspect.signature(function)
    parameters = [
        parameter.replace(default=Told("...") if callable(parameter.default) and parameter.default is not parameter.empty else parameter.default)
        for parameter in whole.parameters.values()
        if parameter.name != "self"
    ]
    told = [parameter.replace(annotation=Told(parameter.annotation)) for parameter in parameters]
    text = str(whole.replace(parameters=told, return_annotation=Told(whole.return_annotation)))
    return f"### `{name}`\n\n```python\n{call}{name}{text}\n```\n\n{documented(function)}"


def documented(what: Any) -> str:
    """A docstring as Markdown: its sections (`Raises:` and the like) as lists."""
    lines = []
    for line in (inspect.getdoc(what) or "").splitlines():
        entry = re.match(r"    ([\w.]+): (.*)", line)
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            lines += ["", f"**{line}**", ""]
        elif entry:
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(re.sub(r"^ {8}", "  ", line).removeprefix("    "))
    return "\n".join(lines)


class Told(str):
    """Text that stands in a signature as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def main() -> int:
    """Write the pages, or say which are not as they would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page would change")
    check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"docs/reference/{name} {'is stale; say: make docs' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
