"""What a row of a data set may look like, and what it means: a Conversation, a Preference or a Document.

No torch, so the service reports on a file line by line before a job starts. Reading bytes stands in `rowfile`, the
parts of a message in `messages`.

| shape | keys |
|---|---|
| messages | messages, tools?, unmask? |
| prompt_completion | prompt, completion (text or messages), tools? |
| question_answer | question, answer |
| alpaca | instruction, input?, output, system?, history? |
| sharegpt | conversations [{from, value}], system?, tools? |
| llama_stack_instruct | chat_completion_input (JSON text of messages), expected_answer, input_query? |
| llama_stack_dialog | dialog (JSON text of messages; every turn counts) |
| preference | prompt?, chosen, rejected (text or messages), tools? |
| openai_preference | input.messages, preferred_output, non_preferred_output |
| document | text, document or content, or a named column |

Other keys (an id, a source) are left out and counted in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from posttrain_trainer.contract.conversation import (
    Conversation,
    Document,
    Kind,
    Preference,
    Row,
    TrainOn,
    kind_of,
    useless,
)
from posttrain_trainer.contract.messages import Message, RowFault, as_text, parse_messages, parse_sharegpt, parse_tools
from posttrain_trainer.contract.remarks import tool_remarks, unknown_keys
from posttrain_trainer.contract.rowfile import MAX_ROW_BYTES, RawRow, read_rows
from posttrain_trainer.contract.rowreport import ParsedRow, RowReport


def validate_file(
    path: Path, *, max_errors: int = 100, name: str | None = None, kind: Kind | None = None, text_column: str | None = None,
    train_on: TrainOn = "assistant", max_row_bytes: int = MAX_ROW_BYTES, max_bytes: int | None = None,
) -> RowReport:  # fmt: skip
    """Check every row of a file, in one pass and constant memory.

    Args:
        path: The file.
        max_errors: Most bad rows that are listed; all are counted.
        name: The name to go by where `path` is a stored upload without one (tells CSV).
        kind: What the rows must mean; None = any of the three, but one for the whole file.
        text_column: Column of documents; None = text, document or content.
        train_on: Which turns of a conversation are learned unless they say otherwise; a row without any is bad.
        max_row_bytes: Longest row.
        max_bytes: Most bytes of unpacked text; None = no limit.

    Raises:
        OSError: The file cannot be opened or read.
    """
    rows = iter_rows(
        path, name=name, kind=kind, text_column=text_column, train_on=train_on, max_row_bytes=max_row_bytes, max_bytes=max_bytes
    )
    return _report(rows, max_errors)


def validate_rows(
    values: Iterable[Any], *, max_errors: int = 100, kind: Kind | None = None, text_column: str | None = None,
    train_on: TrainOn = "assistant",
) -> RowReport:  # fmt: skip
    """Check rows that came inline; their place in the list, from 1, stands for the line."""
    raw = (RawRow(number, value) for number, value in enumerate(values, start=1))
    return _report(parse_rows(raw, kind=kind, text_column=text_column, train_on=train_on), max_errors)


def iter_rows(
    path: Path, *, name: str | None = None, kind: Kind | None = None, text_column: str | None = None,
    train_on: TrainOn = "assistant", max_row_bytes: int = MAX_ROW_BYTES, max_bytes: int | None = None,
) -> Iterator[ParsedRow]:  # fmt: skip
    """Every row of a file in order, bad ones with their error; arguments as for `validate_file`.

    Raises:
        OSError: The file cannot be opened or read.
    """
    raw = read_rows(path, name=name, max_row_bytes=max_row_bytes, max_bytes=max_bytes)
    return parse_rows(raw, kind=kind, text_column=text_column, train_on=train_on)


def parse_rows(
    raw: Iterable[RawRow], *, kind: Kind | None = None, text_column: str | None = None, train_on: TrainOn = "assistant"
) -> Iterator[ParsedRow]:
    """The meaning of each row; with no `kind` given, the first good row decides it for all.

    A row from which nothing can be learned, by `train_on` and what its turns say themselves, is a bad one.
    """
    for line, value, error, fatal in raw:
        if error is not None:
            yield ParsedRow(line, None, error, None, (), fatal)
            continue
        try:
            row, shape, ignored = parse_row(value, text_column=text_column)
        except RowFault as fault:
            yield ParsedRow(line, None, str(fault), None, ())
            continue
        if kind is not None and kind_of(row) != kind:
            yield ParsedRow(line, None, f"is a row of the shape {shape}, but each row must be a {kind}", None, ignored)
        elif (lacks := useless(row, train_on)) is not None:
            yield ParsedRow(line, None, lacks, None, ignored)
        else:
            kind = kind_of(row)
            yield ParsedRow(line, row, None, shape, ignored, remarks=_remarks(row))


def parse_row(value: Any, *, text_column: str | None = None) -> tuple[Row, str, tuple[str, ...]]:
    """The meaning of one decoded row: the row, the name of its shape, and the keys that were left out.

    Raises:
        RowFault: The row is of no known shape, or not well-formed; says where and what to do.
    """
    if not isinstance(value, dict):
        raise RowFault(f"must be an object with named fields, not {type(value).__name__}")
    present = {key: item for key, item in value.items() if item is not None}
    if text_column is not None:
        return Document(as_text(present.get(text_column), text_column)), "document", _others(present, {text_column})
    for shape in _SHAPES:
        if all(key in present for key in shape.needs):
            others = _others(present, {*shape.needs, *shape.takes, "metadata"})
            return shape.parse(present), shape.name, others + _unknown(present, shape.turns)
    raise RowFault(f"has the keys {sorted(present)[:10]}, which are no known shape; use messages, or prompt and completion")


def _others(row: dict[str, Any], known: set[str]) -> tuple[str, ...]:
    return tuple(str(key)[:64] for key in row if key not in known)


def _unknown(row: dict[str, Any], fields: tuple[str, ...]) -> tuple[str, ...]:
    """Keys without meaning inside the messages of the fields."""
    found = [key for field in fields if field in row for key in unknown_keys(row[field], field, as_json=field not in _TEXT_OR_TURNS)]
    if "input.messages" in fields:
        source = row["input"]
        found += [f"input.{key}" for key in _others(source, {"messages", "tools"}) if source[key] is not None]
        found += unknown_keys(source["messages"], "input.messages")
    return tuple(found)


def _remarks(row: Row) -> tuple[str, ...]:
    if isinstance(row, Conversation):
        return tool_remarks(row.messages)
    if isinstance(row, Preference):
        return tuple(dict.fromkeys(tool_remarks(row.prompt + row.chosen) + tool_remarks(row.prompt + row.rejected)))
    return ()


def _report(rows: Iterable[ParsedRow], max_errors: int) -> RowReport:
    report = RowReport()
    for row in rows:
        report.add(row, max_errors)
    return report.close(max_errors)


def _messages(row: dict[str, Any]) -> Row:
    unmask = row.get("unmask", False)
    if not isinstance(unmask, bool):
        raise RowFault(f"unmask: must be true or false, not {unmask!r}")
    return Conversation(parse_messages(row["messages"], "messages"), parse_tools(row.get("tools")), unmask)


def _context(turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """A prompt: its own assistant turns were said by somebody and are not learned."""
    return tuple(m.untrained() if m.role == "assistant" and m.train is None else m for m in turns)


def _turns(value: Any, where: str, role: Literal["user", "assistant"]) -> tuple[Message, ...]:
    if isinstance(value, list | dict):
        return parse_messages(value if isinstance(value, list) else [value], where)
    return (Message(role, as_text(value, where)),)


def _pair(question: str, answer: str) -> Callable[[dict[str, Any]], Row]:
    def parse(row: dict[str, Any]) -> Row:
        turns = _context(_turns(row[question], question, "user")) + _turns(row[answer], answer, "assistant")
        return Conversation(turns, parse_tools(row.get("tools")))

    return parse


def _alpaca(row: dict[str, Any]) -> Row:
    turns = _system(row)
    for number, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowFault(f"history[{number}]: must be a pair of question and answer")
        turns += [Message("user", as_text(pair[0], f"history[{number}][0]"))]
        turns += [Message("assistant", as_text(pair[1], f"history[{number}][1]"))]
    question = as_text(row["instruction"], "instruction")
    if row.get("input"):
        question += "\n\n" + as_text(row["input"], "input")
    turns += [Message("user", question), Message("assistant", as_text(row["output"], "output"))]
    return Conversation(tuple(turns))


def _system(row: dict[str, Any]) -> list[Message]:
    return [Message("system", as_text(row["system"], "system"))] if row.get("system") else []


def _sharegpt(row: dict[str, Any]) -> Row:
    turns = (*_system(row), *parse_sharegpt(row["conversations"], "conversations"))
    return Conversation(turns, parse_tools(row.get("tools")))


def _instruct(row: dict[str, Any]) -> Row:
    turns = _context(parse_messages(row["chat_completion_input"], "chat_completion_input", as_list=True))
    return Conversation((*turns, Message("assistant", as_text(row["expected_answer"], "expected_answer"))))


def _dialog(row: dict[str, Any]) -> Row:
    return Conversation(parse_messages(row["dialog"], "dialog"))


def _preference(row: dict[str, Any]) -> Row:
    prompt = _turns(row["prompt"], "prompt", "user") if "prompt" in row else ()
    chosen = _turns(row["chosen"], "chosen", "assistant")
    rejected = _turns(row["rejected"], "rejected", "assistant")
    if not prompt:  # both answers are whole conversations: what they share is the prompt
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    return _checked(Preference(prompt, chosen, rejected, parse_tools(row.get("tools"))))


def _openai_preference(row: dict[str, Any]) -> Row:
    source = row["input"]
    if not isinstance(source, dict) or "messages" not in source:
        raise RowFault("input: must be an object with messages")
    chosen = parse_messages(row["preferred_output"], "preferred_output")
    rejected = parse_messages(row["non_preferred_output"], "non_preferred_output")
    return _checked(Preference(parse_messages(source["messages"], "input.messages"), chosen, rejected, parse_tools(source.get("tools"))))


def _checked(row: Preference) -> Preference:
    if not row.prompt:
        raise RowFault("prompt: is missing, and chosen and rejected share no first turn")
    if not row.chosen or not row.rejected or row.chosen == row.rejected:
        raise RowFault("chosen and rejected must be two different answers")
    return row


def _document(column: str) -> Callable[[dict[str, Any]], Row]:
    def parse(row: dict[str, Any]) -> Row:
        if "role" in row:
            raise RowFault("is a single message; give the turns of one conversation as a list in messages")
        return Document(as_text(row[column], column))

    return parse


class _Shape(NamedTuple):
    name: str
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    parse: Callable[[dict[str, Any]], Row]
    turns: tuple[str, ...] = ()
    """Fields that hold messages, or may."""


_TEXT_OR_TURNS = frozenset({"prompt", "completion", "question", "answer", "chosen", "rejected"})
"""Fields whose text is text, also where it looks like JSON."""

# In order: a row with the keys of several shapes is of the first that it has all keys of.
_SHAPES = (
    _Shape("preference", ("chosen", "rejected"), ("prompt", "tools"), _preference, ("prompt", "chosen", "rejected")),
    _Shape("openai_preference", ("input", "preferred_output", "non_preferred_output"), (), _openai_preference, ("input.messages", "preferred_output", "non_preferred_output")),
    _Shape("messages", ("messages",), ("tools", "unmask"), _messages, ("messages",)),
    _Shape("sharegpt", ("conversations",), ("system", "tools"), _sharegpt, ("conversations",)),
    _Shape("prompt_completion", ("prompt", "completion"), ("tools",), _pair("prompt", "completion"), ("prompt", "completion")),
    _Shape("question_answer", ("question", "answer"), ("tools",), _pair("question", "answer"), ("question", "answer")),
    _Shape("alpaca", ("instruction", "output"), ("input", "system", "history"), _alpaca),
    _Shape("llama_stack_dialog", ("dialog",), ("input_query", "expected_answer", "chat_completion_input"), _dialog, ("dialog",)),
    _Shape("llama_stack_instruct", ("chat_completion_input", "expected_answer"), ("input_query",), _instruct, ("chat_completion_input",)),
    _Shape("document", ("text",), (), _document("text")),
    _Shape("document", ("document",), (), _document("document")),
    _Shape("document", ("content",), (), _document("content")),
)
