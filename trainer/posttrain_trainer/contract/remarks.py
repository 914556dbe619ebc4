"""What is odd about rows that can be trained on: keys of messages that mean nothing, tool calls and results that miss each other.

Standard library only. Nothing here makes a row bad; everything is told with its lines, so that nothing is ignored in
silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from posttrain_trainer.contract.messages import Message
from posttrain_trainer.contract.rowfile import parse_json

_REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})
_ALWAYS = frozenset({"role", "content", "name", "train", "weight"})
_BY_ROLE = {"assistant": _ALWAYS | _REASONING | {"tool_calls"}, "tool": _ALWAYS | {"tool_call_id"}}
_SHAREGPT = frozenset({"from", "value", "train", "weight"})
_PART = frozenset({"type", "text"})
_CALL = frozenset({"id", "type", "function"})
_FUNCTION = frozenset({"name", "arguments"})


def unknown_keys(value: Any, where: str, *, as_json: bool = True) -> tuple[str, ...]:
    """Keys without meaning in the messages of a row whose messages were found good, as `messages[].key`, each once.

    Args:
        value: The list of messages (also of `{from, value}`), a single message, or text.
        where: Name of the field.
        as_json: Whether text is the JSON text of messages; else it is just text, which has no keys.
    """
    if isinstance(value, str):
        value = parse_json(value) if as_json else []
    items = [item for item in (value if isinstance(value, list) else [value]) if not _is_plain(item)]
    return tuple(dict.fromkeys(key for item in items if isinstance(item, dict) for key in _in_message(item, f"{where}[]")))


def _is_plain(item: Any) -> bool:
    """Whether there is nothing to look for, as in nearly all messages: just a role and its text."""
    return isinstance(item, dict) and len(item) == 2 and "role" in item and isinstance(item.get("content"), str)


def _in_message(item: dict[str, Any], where: str) -> Iterator[str]:
    if "from" in item:
        yield from _others(item, _SHAREGPT, where)
        return
    yield from _others(item, _BY_ROLE.get(str(item.get("role")), _ALWAYS), where)
    for name in ("content", *_REASONING):
        if isinstance(parts := item.get(name), list):
            for part in parts:
                yield from _others(part, _PART, f"{where}.{name}[]")
    for call in item.get("tool_calls") or ():
        if "function" in call:
            yield from _others(call, _CALL, f"{where}.tool_calls[]")
            yield from _others(call["function"], _FUNCTION, f"{where}.tool_calls[].function")
        else:
            yield from _others(call, _CALL | _FUNCTION, f"{where}.tool_calls[]")


def _others(item: Any, known: Iterable[str], where: str) -> Iterator[str]:
    if isinstance(item, dict):
        yield from (f"{where}.{str(key)[:64]}" for key in item if key not in known and item[key] is not None)


def tool_remarks(turns: Sequence[Message]) -> tuple[str, ...]:
    """What does not fit between the tool calls of a conversation and their results, each fault once.

    Calls without ids (as sharegpt has them) are matched by their number. Calls that nothing follows any more are fine:
    the conversation ends by calling.
    """
    if not any(turn.tool_calls or turn.role == "tool" for turn in turns):
        return ()
    found: dict[str, None] = {}
    open_calls: list[str | None] = []
    called = False
    for turn in turns:
        if turn.role == "tool":
            found |= dict.fromkeys(_answer(turn, open_calls, called))
            continue
        if open_calls:
            found["a tool call that gets no result before the conversation goes on"] = None
        open_calls = [call.get("id") for call in turn.tool_calls]
        known = [call for call in open_calls if call is not None]
        if len(set(known)) < len(known):
            found["two tool calls of one turn with the same id"] = None
        called = called or bool(turn.tool_calls)
    return tuple(found)


def _answer(turn: Message, open_calls: list[str | None], called: bool) -> Iterator[str]:
    """Take the call that a result answers off the list; say what does not fit."""
    if not called:
        yield "a tool result that no tool call precedes"
        return
    if turn.tool_call_id in open_calls and turn.tool_call_id is not None:
        open_calls.remove(turn.tool_call_id)
        return
    if turn.tool_call_id is None and any(call is not None for call in open_calls):
        yield "a tool result without the tool_call_id of its call"
    elif turn.tool_call_id is not None and None not in open_calls:
        yield "a tool result whose tool_call_id is of no open call"
    elif not open_calls:
        yield "more tool results than tool calls"
    if open_calls:
        open_calls.pop(open_calls.index(None) if None in open_calls else 0)
