"""Every row shape, what it means, and how a bad row is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from posttrain_trainer.contract.conversation import Conversation, Document, Preference
from posttrain_trainer.contract.messages import Message, RowFault
from posttrain_trainer.contract.rowreport import MAX_LINES
from posttrain_trainer.contract.rows import parse_row, validate_rows

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


def turns(*roles, **last):
    said = [{"role": role, "content": "x"} for role in roles]
    return {"messages": [*said[:-1], said[-1] | last]}


@pytest.mark.parametrize(
    ("row", "taught_by"),
    [
        (turns("user", "assistant"), {"assistant", "last_assistant", "all"}),
        (turns("user"), {"all"}),
        (turns("system", "user"), {"all"}),
        (turns("system"), set()),
        (turns("user", "assistant", weight=0), {"all"}),
        (turns("user", "assistant", train=False), {"all"}),
        (turns("system", "assistant", weight=0), set()),
        (turns("user", "assistant", "assistant", weight=0), {"assistant", "all"}),
        (turns("assistant", "user", train=True), {"assistant", "last_assistant", "all"}),
        (turns("user", train=True), {"assistant", "last_assistant", "all"}),
        (turns("user") | {"unmask": True}, {"assistant", "last_assistant", "all"}),
        (turns("system") | {"unmask": True}, set()),
        (turns("user", "assistant", weight=0) | {"unmask": True}, {"assistant", "last_assistant", "all"}),
        ({"prompt": "x", "completion": [{"role": "user", "content": "y"}]}, {"all"}),
        ({"prompt": turns("user", "assistant")["messages"], "completion": [{"role": "user", "content": "y"}]}, {"all"}),
        ({"conversations": [{"from": "human", "value": "x"}]}, {"all"}),
    ],
)
def test_a_row_that_teaches_nothing_is_bad(row, taught_by):
    for train_on in ("assistant", "last_assistant", "all"):
        report = validate_rows([row, {"messages": TURNS}], train_on=train_on)
        assert (report.rows, report.valid) == (2, train_on in taught_by), train_on
        assert [error.line for error in report.errors] == ([] if train_on in taught_by else [1])
        assert all("nothing can be learned" in error.message for error in report.errors)


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_what_pairs_and_documents_teach_does_not_depend_on_train_on(train_on):
    nobody = [{"role": "user", "content": "y"}]
    silent = [{"role": "assistant", "content": "y", "weight": 0}]
    for answer in (nobody, silent):
        report = validate_rows([{"prompt": "x", "chosen": "a", "rejected": answer}], kind="preference", train_on=train_on)
        assert "rejected: has no turn of the assistant" in report.errors[0].message
    context = {"prompt": turns("user", "assistant", "user", weight=0)["messages"], "chosen": "a", "rejected": "b"}
    assert validate_rows([context], kind="preference", train_on=train_on).valid
    report = validate_rows([{"text": "a"}, {"text": " \n"}], kind="document", train_on=train_on)
    assert [(error.line, "empty" in error.message) for error in report.errors] == [(2, True)]


CALLS = [{"id": "c1", **CALL}, {"id": "c2", **CALL}]
CALLING = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": CALLS}]
BARE = {"role": "assistant", "content": None, "tool_calls": [CALL]}
DONE = {"role": "assistant", "content": "done"}


def result(call_id=None):
    return {"role": "tool", "content": "3"} | ({} if call_id is None else {"tool_call_id": call_id})


@pytest.mark.parametrize(
    ("messages", "remark"),
    [
        ([*CALLING, result("c1"), result("c2"), DONE], None),
        ([*CALLING, result("c2"), result("c1"), DONE], None),
        (CALLING, None),
        ([TURNS[0], BARE, result(), DONE], None),
        ([TURNS[0], BARE, result("any"), DONE], None),
        ([*CALLING, result("c1"), result("c2"), *CALLING, result("c1"), result("c2"), DONE], None),
        ([TURNS[0], result("c1"), DONE], "a tool result that no tool call precedes"),
        ([*CALLING, result("c1"), result("other"), DONE], "a tool result whose tool_call_id is of no open call"),
        ([*CALLING, result("c1"), result("c1"), DONE], "a tool result whose tool_call_id is of no open call"),
        ([*CALLING, result(), result("c2"), DONE], "a tool result without the tool_call_id of its call"),
        ([*CALLING, result("c1"), DONE], "a tool call that gets no result before the conversation goes on"),
        ([TURNS[0], BARE, result(), result(), DONE], "more tool results than tool calls"),
        ([TURNS[0], {**BARE, "tool_calls": CALLS[:1] * 2}, result("c1"), result("c1"), DONE], "two tool calls of one turn with the same id"),
    ],
)
def test_tool_calls_and_results_that_miss_each_other_are_told(messages, remark):
    for rows in ([{"messages": TURNS}, {"messages": messages}], [{"messages": TURNS}, {"messages": json.dumps(messages)}]):
        report = validate_rows(rows)
        assert report.valid
        assert {text: (found.rows, found.lines) for text, found in report.remarks.items()} == ({} if remark is None else {remark: (1, [2])})


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": [TURNS[0], {**TURNS[1], "mood": "glad"}]}, "messages[].mood"),
        ({"messages": json.dumps([TURNS[0], {**TURNS[1], "mood": "glad"}])}, "messages[].mood"),
        ({"messages": [{**TURNS[0], "tool_call_id": "c1"}, TURNS[1]]}, "messages[].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache": 1}]}, TURNS[1]]}, "messages[].content[].cache"),
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}]}, "messages[].tool_calls[].index"),
        (
            {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"function": {"name": "add", "strict": True}}]}]},
            "messages[].tool_calls[].function.strict",
        ),
        ({"conversations": [{"from": "human", "value": "Hi", "id": 3}, {"from": "gpt", "value": "Yo"}]}, "conversations[].id"),
        ({"prompt": [{**TURNS[0], "lang": "de"}], "completion": "Yo"}, "prompt[].lang"),
        ({"prompt": "Hi", "chosen": [{**TURNS[1], "score": 1}], "rejected": "No"}, "chosen[].score"),
        (
            {"input": {"messages": TURNS[:1], "parallel_tool_calls": True}, "preferred_output": TURNS[1:], "non_preferred_output": [DONE]},
            "input.parallel_tool_calls",
        ),
        (
            {"input": {"messages": [{**TURNS[0], "lang": "de"}]}, "preferred_output": TURNS[1:], "non_preferred_output": [DONE]},
            "input.messages[].lang",
        ),
        ({"messages": [TURNS[0], {**TURNS[1], "refusal": None, "audio": None, "function_call": None, "tool_calls": None}]}, None),
        ({"prompt": '[{"mood": 1}]', "completion": '{"mood": 1}'}, None),
    ],
)
def test_keys_without_meaning_inside_messages_are_told(row, key):
    report = validate_rows([row])
    assert report.valid
    assert report.ignored == ({} if key is None else {key: 1})
    assert [(key in text, remark.lines) for text, remark in report.remarks.items()] == ([] if key is None else [(True, [1])])


def test_remarks_are_counted_beyond_the_lines_that_are_listed():
    report = validate_rows([{"messages": TURNS, "id": 1}] * (MAX_LINES + 5))
    [remark] = report.remarks.values()
    assert (remark.rows, remark.lines) == (MAX_LINES + 5, list(range(1, MAX_LINES + 1)))
