"""Every row shape, what it means, and how a bad row is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from posttrain_trainer.contract.messages import Message, RowFault
from posttrain_trainer.contract.rows import Conversation, Document, Preference, parse_row, validate_rows

ASK, SAY = Message("user", "Hi"), Message("assistant", "Yo")
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        ({"messages": TURNS}, "messages", (ASK, SAY)),
        ({"messages": json.dumps(TURNS)}, "messages", (ASK, SAY)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, TURNS[1]]}, "messages", (ASK, SAY)),
        ({"prompt": "Hi", "completion": "Yo"}, "prompt_completion", (ASK, SAY)),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "prompt_completion", (ASK, SAY)),
        ({"question": "Hi", "answer": "Yo"}, "question_answer", (ASK, SAY)),
        ({"instruction": "Hi", "output": "Yo"}, "alpaca", (ASK, SAY)),
        ({"instruction": "Hi", "input": "", "output": "Yo"}, "alpaca", (ASK, SAY)),
        ({"instruction": "Hi", "input": "there", "output": "Yo"}, "alpaca", (Message("user", "Hi\n\nthere"), SAY)),
        ({"instruction": "Hi", "output": "Yo", "history": [["A", "B"]]}, "alpaca", (Message("user", "A"), Message("assistant", "B"), ASK, SAY)),
        ({"instruction": "Hi", "output": "Yo", "system": "S"}, "alpaca", (Message("system", "S"), ASK, SAY)),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, "sharegpt", (ASK, SAY)),
        ({"conversations": TURNS}, "sharegpt", (ASK, SAY)),
        (
            {"chat_completion_input": json.dumps(TURNS[:1]), "input_query": "Hi", "expected_answer": "Yo"},
            "llama_stack_instruct",
            (ASK, SAY),
        ),
        (
            {"dialog": json.dumps(TURNS + TURNS), "chat_completion_input": "[]", "input_query": "", "expected_answer": ""},
            "llama_stack_dialog",
            (ASK, SAY, ASK, SAY),
        ),
    ],
)
def test_conversation_shapes(row, shape, messages):
    parsed, name, ignored = parse_row(row)
    assert (name, ignored) == (shape, ())
    assert isinstance(parsed, Conversation)
    assert parsed.messages == messages


def test_answers_inside_a_prompt_are_context_unless_they_say_otherwise():
    prompt = [*TURNS, {"role": "assistant", "content": "Kept", "train": True}, TURNS[0]]
    parsed, _, _ = parse_row({"prompt": prompt, "completion": "End"})
    assert [message.train for message in parsed.messages] == [None, False, True, None, None]


def test_tool_calls_take_one_form():
    calls = [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"name": "add", "arguments": {"a": 1}},
        {"function": {"name": "now", "arguments": ""}},
    ]
    row = {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": calls}], "tools": "[]"}
    parsed, _, _ = parse_row(row)
    assert parsed.messages[1].content == ""
    assert parsed.messages[1].tool_calls == (
        {"id": "1", **CALL},
        CALL,
        {"type": "function", "function": {"name": "now", "arguments": {}}},
    )
    assert parsed.tools == ()


def test_sharegpt_function_call_becomes_a_tool_call():
    turns = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}, {"from": "observation", "value": "2"}]
    parsed, _, _ = parse_row({"conversations": turns, "tools": '[{"name": "add"}]'})
    assert [message.role for message in parsed.messages] == ["user", "assistant", "tool"]
    assert parsed.messages[1].tool_calls == (CALL,)
    assert parsed.tools == ({"name": "add"},)


def test_tools_of_two_rows_keep_their_own_keys_and_types():
    first, second = ({"messages": TURNS, "tools": [{"name": "at", "example": time}]} for time in ({"time": "2025-08-01"}, {"when": 1690876800}))
    assert parse_row(first)[0].tools == ({"name": "at", "example": {"time": "2025-08-01"}},)
    assert parse_row(second)[0].tools == ({"name": "at", "example": {"when": 1690876800}},)


def test_reasoning_has_one_name_and_reaches_templates_under_both():
    for key in ("reasoning_content", "thinking", "reasoning"):
        parsed, _, _ = parse_row({"messages": [TURNS[0], {**TURNS[1], key: "hm"}]})
        assert parsed.messages[1].reasoning == "hm"
        assert parsed.messages[1].as_dict() == {"role": "assistant", "content": "Yo", "reasoning_content": "hm", "thinking": "hm"}


def test_preference_shapes():
    bad = [{"role": "assistant", "content": "No"}]
    want = Preference((ASK,), (SAY,), (Message("assistant", "No"),))
    assert parse_row({"prompt": "Hi", "chosen": "Yo", "rejected": "No"})[0] == want
    assert parse_row({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": bad})[0] == want
    assert parse_row({"chosen": TURNS, "rejected": [TURNS[0], *bad]})[0] == want
    openai = {"input": {"messages": TURNS[:1], "tools": []}, "preferred_output": TURNS[1:], "non_preferred_output": bad}
    assert parse_row(openai) == (want, "openai_preference", ())


def test_documents_by_known_or_named_column():
    assert parse_row({"text": "abc"}) == (Document("abc"), "document", ())
    assert parse_row({"body": "abc", "id": 3}, text_column="body") == (Document("abc"), "document", ("id",))


def test_keys_without_meaning_are_counted():
    report = validate_rows([{"messages": TURNS, "id": 1, "metadata": {}}, {"messages": TURNS, "source": "x", "id": 2}])
    assert report.valid
    assert report.ignored == {"id": 2, "source": 1}


def message_row(**fields):
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def answer_row(**fields):
    return {"messages": [TURNS[0], {"role": "assistant", "content": "Yo", **fields}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("text", "must be an object"),
        ({"foo": 1}, "no known shape"),
        ({}, "no known shape"),
        ({"messages": None}, "no known shape"),
        ({"role": "user", "content": "Hi"}, "single message"),
        ({"messages": []}, "at least one message"),
        ({"messages": "{"}, "not JSON text"),
        ({"messages": ["Hi"]}, "messages[0]: must be an object"),
        (message_row(role="developer"), "use system"),
        (message_row(role=["user"]), "use one of"),
        (message_row(content=None), "messages[0].content: is missing"),
        (message_row(content=3), "must be text"),
        (message_row(content=[{"type": "image_url", "image_url": {}}]), "type 'image_url'; only text"),
        (message_row(tool_calls=[CALL]), "only an assistant calls tools"),
        (message_row(weight=1), "use train: true"),
        (message_row(name=3), "name: must be text"),
        (message_row(reasoning_content="x"), "only an assistant reasons"),
        (answer_row(content=" "), "teaches silence"),
        (answer_row(weight=2), "must be 0 or 1"),
        (answer_row(weight=True), "must be 0 or 1"),
        (answer_row(train="yes"), "must be true or false"),
        (answer_row(train=True, weight=0), "contradict"),
        (answer_row(function_call={"name": "x"}), "use tool_calls"),
        (answer_row(tool_calls=[{"function": {"arguments": {}}}]), "function.name"),
        (answer_row(tool_calls=[{"function": {"name": "x", "arguments": "{"}}]), "not JSON text"),
        (answer_row(tool_calls=[{"function": {"name": "x", "arguments": [1]}}]), "must be an object or its JSON text"),
        (answer_row(thinking="a", reasoning_content="b"), "differ; give one"),
        ({"messages": TURNS, "tools": {"name": "x"}}, "must be a list of objects"),
        ({"messages": TURNS, "unmask": "yes"}, "unmask: must be true or false"),
        ({"prompt": "Hi", "chosen": "Yo", "rejected": "Yo"}, "two different answers"),
        ({"chosen": "Yo", "rejected": "No"}, "share no first turn"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "is 'alien'"),
    ],
)
def test_bad_rows_say_where_and_what(row, said):
    with pytest.raises(RowFault) as caught:
        parse_row(row)
    assert said in str(caught.value)


def test_the_first_good_row_decides_the_kind():
    report = validate_rows([{"messages": TURNS}, {"text": "abc"}, {"prompt": "Hi", "completion": "Yo"}])
    assert report.formats == {"messages": 1, "prompt_completion": 1}
    assert [error.line for error in report.errors] == [2]
    assert "must be a conversation" in report.errors[0].message


def test_an_asked_for_kind_is_kept():
    report = validate_rows([{"prompt": "Hi", "chosen": "Yo", "rejected": "No"}], kind="conversation")
    assert report.num_errors == 1
    assert validate_rows([{"prompt": "Hi", "chosen": "Yo", "rejected": "No"}], kind="preference").valid


def test_all_errors_are_counted_and_the_first_listed():
    report = validate_rows([{"bad": 1}] * 7 + [{"messages": TURNS}], max_errors=3)
    assert (report.rows, report.num_errors, report.valid, report.format) == (8, 7, False, "messages")
    assert [error.line for error in report.errors] == [1, 2, 3]


def test_no_rows_is_an_error():
    report = validate_rows([])
    assert (report.valid, report.fatal, report.num_errors) == (False, True, 1)


def test_the_module_is_light():
    code = "import sys, posttrain_trainer.contract.rows; print([m for m in ('torch', 'numpy', 'pyarrow', 'zstandard', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
