"""The turns of a conversation: one message, its tool calls, the tools on offer; how each is read from JSON.

Standard library only. Everything is brought into one form that chat templates understand: content is text, arguments
of a tool call are an object, reasoning has one name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from posttrain_trainer.contract.rowfile import parse_json

Role = Literal["system", "user", "assistant", "tool"]
_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "model": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_REFUSED = {
    "function_call": "use tool_calls",
    "images": "only text can be trained on",
    "image": "only text can be trained on",
    "audio": "only text can be trained on",
    "refusal": "give the refusal as content",
}


class RowFault(ValueError):
    """A row that cannot be used: where in the row, what is wrong, the remedy."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: Role
    content: str
    """The text; empty where an assistant only calls tools."""
    name: str | None = None
    """Who speaks, or which tool answers."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """`{"type": "function", "function": {"name", "arguments": object}}` each, with `id` where the row has one."""
    tool_call_id: str | None = None
    """Which call a tool turn answers."""
    reasoning: str | None = None
    """What the assistant thought before it spoke."""
    train: bool | None = None
    """Whether the turn is trained on; None = as the job's `train_on` says."""

    def untrained(self) -> Message:
        """The same turn as context only."""
        return replace(self, train=False)

    def as_dict(self) -> dict[str, Any]:
        """The turn as chat templates take it; absent parts have no key."""
        data: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            data["name"] = self.name
        if self.tool_calls:
            data["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            data["tool_call_id"] = self.tool_call_id
        if self.reasoning is not None:
            data["reasoning_content"] = data["thinking"] = self.reasoning  # templates use one name or the other
        return data


def parse_messages(value: Any, where: str, *, as_list: bool = False) -> tuple[Message, ...]:
    """The turns of a list (or its JSON text, as CSV and llama-stack have it).

    Args:
        value: The decoded list or JSON text.
        where: Name of the field, for the message of a fault.
        as_list: A single message outside a list is taken, too.

    Raises:
        RowFault: Not a list of good messages, or an empty one.
    """
    if isinstance(value, str):
        value = _from_json(value, where)
    if as_list and isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RowFault(f"{where}: must be a list of at least one message, not {_short(value)}")
    return tuple(_message(item, f"{where}[{number}]") for number, item in enumerate(value))


def parse_sharegpt(value: Any, where: str) -> tuple[Message, ...]:
    """The turns of a list of `{from, value}`.

    Raises:
        RowFault: As for `parse_messages`.
    """
    if isinstance(value, str):
        value = _from_json(value, where)
    if not isinstance(value, list) or not value:
        raise RowFault(f"{where}: must be a list of at least one turn, not {_short(value)}")
    return tuple(_sharegpt_turn(item, f"{where}[{number}]") for number, item in enumerate(value))


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools on offer: a list of JSON schemas or its JSON text; nothing gives an empty tuple.

    Raises:
        RowFault: Not a list of objects.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = _from_json(value, "tools") if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowFault(f"tools: must be a list of objects, not {_short(value)}")
    return tuple(value)


def as_text(value: Any, where: str) -> str:
    """Text, or the text of a list of text parts.

    Raises:
        RowFault: Something else, e.g. a part that is an image.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(value))
    if value is None:
        raise RowFault(f"{where}: is missing")
    raise RowFault(f"{where}: must be text, not {_short(value)}")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowFault(f"{where}: must be a text part, not {_short(part)}")
    if part.get("type", "text") not in ("text", "input_text", "output_text"):
        raise RowFault(f"{where}: is a part of type {part.get('type')!r}; only text can be trained on")
    return as_text(part.get("text"), f"{where}.text")


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise RowFault(f"{where}: must be an object with role and content, not {_short(item)}")
    role = item.get("role")
    if role not in _ROLES:
        remedy = "; use system" if role == "developer" else f"; use one of {', '.join(_ROLES)}"
        raise RowFault(f"{where}.role: is {_short(role)}{remedy}")
    for key, remedy in _REFUSED.items():
        if item.get(key) is not None:
            raise RowFault(f"{where}.{key}: is not supported; {remedy}")
    calls = tuple(_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(_list(item.get("tool_calls"), where)))
    if calls and role != "assistant":
        raise RowFault(f"{where}.tool_calls: only an assistant calls tools, not a {role}")
    reasoning = _reasoning(item, where)
    content = "" if item.get("content") is None and calls else as_text(item.get("content"), f"{where}.content")
    return _not_empty(
        Message(
            role=cast(Role, role),
            content=content,
            name=_optional(item, "name", where),
            tool_calls=calls,
            tool_call_id=_optional(item, "tool_call_id", where),
            reasoning=reasoning,
            train=_train(item, role, where),
        ),
        where,
    )


def _not_empty(message: Message, where: str) -> Message:
    if message.role == "assistant" and not (message.content.strip() or message.tool_calls or message.reasoning):
        raise RowFault(f"{where}.content: is empty, which teaches silence; remove the turn or the row")
    return message


def _sharegpt_turn(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise RowFault(f"{where}: must be an object with from and value, not {_short(item)}")
    if "from" not in item and "role" in item:
        return _message(item, where)
    source = item.get("from")
    if source == "function_call":
        calls = _from_json(as_text(item.get("value"), f"{where}.value"), f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        return Message("assistant", "", tool_calls=tuple(_tool_call(call, f"{where}.value") for call in calls), train=_train(item, "assistant", where))
    if not isinstance(source, str) or source not in _SHAREGPT_ROLES:
        raise RowFault(f"{where}.from: is {_short(source)}; use one of {', '.join(_SHAREGPT_ROLES)}, function_call")
    role = _SHAREGPT_ROLES[source]
    return _not_empty(Message(role, as_text(item.get("value"), f"{where}.value"), train=_train(item, role, where)), where)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RowFault(f"{where}: must be an object, not {_short(call)}")
    function = call.get("function", call)
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise RowFault(f"{where}: only function calls can be trained on, not {_short(call.get('type'))}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowFault(f"{where}.function.name: must be text, not {_short(name)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"{where}.function.arguments") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RowFault(f"{where}.function.arguments: must be an object or its JSON text, not {_short(arguments)}")
    known: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **known} if isinstance(call.get("id"), str) else known


def _reasoning(item: dict[str, Any], where: str) -> str | None:
    given = {key: item[key] for key in ("reasoning_content", "thinking", "reasoning") if item.get(key)}
    if not given:
        return None
    if item.get("role") != "assistant":
        raise RowFault(f"{where}: only an assistant reasons, not a {item.get('role')}")
    texts = {as_text(value, f"{where}.{key}") for key, value in given.items()}
    if len(texts) > 1:
        raise RowFault(f"{where}: {' and '.join(given)} differ; give one")
    return texts.pop()


def _train(item: dict[str, Any], role: str, where: str) -> bool | None:
    """The turn's own flag: `train` (any role) or OpenAI's `weight` 0 or 1 (an assistant's)."""
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowFault(f"{where}.train: must be true or false, not {_short(train)}")
    if weight is None:
        return train
    if isinstance(weight, bool) or weight not in (0, 1):
        raise RowFault(f"{where}.weight: must be 0 or 1, not {_short(weight)}")
    if weight and role != "assistant":
        raise RowFault(f"{where}.weight: is for assistant turns; use train: true to learn a {role} turn")
    if train is not None and train != bool(weight):
        raise RowFault(f"{where}: train and weight contradict each other; give one")
    return bool(weight)


def _optional(item: dict[str, Any], key: str, where: str) -> str | None:
    value = item.get(key)
    if value is not None and not isinstance(value, str):
        raise RowFault(f"{where}.{key}: must be text, not {_short(value)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowFault(f"{where}.tool_calls: must be a list, not {_short(value)}")
    return value


def _from_json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise RowFault(f"{where}: is not JSON text: {error}") from error


def _short(value: Any) -> str:
    """The value as a message shows it, cut to a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
