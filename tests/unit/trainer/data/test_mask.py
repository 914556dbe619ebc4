"""Which tokens are learned, proven token by token against templates of the common families."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.messages import RowFault
from posttrain_trainer.contract.rows import parse_row
from posttrain_trainer.data.mask import encode, token_mask
from posttrain_trainer.models.templates import CHATML

END = {
    "chatml": "<|im_end|>", "chatml_generation": "<|im_end|>", "chatml_generation_without_end": "<|im_end|>",
    "chatml_generation_with_newline": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>",
    "granite": "<|end_of_text|>", "phi": "<|end|>", "qwen3": "<|im_end|>", "r1": "</s>", "plain": "</s>",
}  # fmt: skip
USER = {"role": "user", "content": "alpha prompt."}
ANSWER = {"role": "assistant", "content": "beta answer."}
FOUR = [USER, ANSWER, {"role": "user", "content": "What is it?\n"}, {"role": "assistant", "content": "\nParis\n\nis é 漢."}]


def learned(row, tokenizer, train_on="assistant"):
    """The stretches of learned tokens, decoded."""
    ids, trained = encode(parse_row(row)[0], tokenizer, train_on)
    assert len(ids) == len(trained)
    edges = np.flatnonzero(np.diff([False, *trained, False])).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]) for start, end in edges]


@pytest.mark.parametrize(("name", "special", "trim"), list(product(END, (True, False), (True, False))))
def test_four_turns_learn_both_answers_with_their_end(make_tokenizer, name, special, trim):
    tokenizer = make_tokenizer(name, special=special, trim_offsets=trim)
    space = " " if name == "mistral" else ""  # its template puts one between [/INST] and the answer
    strips = name in ("llama3", "gemma")
    last = FOUR[3]["content"].strip() if strips else FOUR[3]["content"]
    assert learned({"messages": FOUR}, tokenizer) == [space + "beta answer." + END[name], space + last + END[name]]


@pytest.mark.parametrize("name", END)
def test_ids_are_those_of_the_template(make_tokenizer, name):
    tokenizer = make_tokenizer(name)
    ids, _ = encode(parse_row({"messages": FOUR})[0], tokenizer, "assistant")
    text = tokenizer.apply_chat_template(FOUR, tokenize=False)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[:2] != [tokenizer.bos_token_id] * 2
    assert tokenizer(text)["input_ids"][:1] == [tokenizer.bos_token_id], "this tokenizer would add a second one"


@pytest.mark.parametrize("name", [name for name in END if name != "r1"])  # whose generation prompt opens a tag that answers lack
def test_the_prompt_up_to_an_answer_is_what_generation_sees(make_tokenizer, name):
    tokenizer = make_tokenizer(name)
    ids, trained = encode(parse_row({"messages": [USER, ANSWER]})[0], tokenizer, "assistant")
    prompt = tokenizer.apply_chat_template([USER], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids[: trained.index(True)]) == tokenizer.decode(prompt)
    if name != "llama3":  # where GPT-2's splitting takes the last of two line ends for itself when text follows
        assert ids[: trained.index(True)] == prompt


@pytest.mark.parametrize("name", END)
def test_only_the_last_answer(make_tokenizer, name):
    (text,) = learned({"messages": FOUR}, make_tokenizer(name), "last_assistant")
    assert text.strip() == FOUR[3]["content"].strip() + END[name]


@pytest.mark.parametrize("name", ["chatml", "chatml_generation", "llama3", "granite", "phi", "qwen3"])
def test_all_is_every_turn_but_the_systems(make_tokenizer, name):
    system = {"role": "system", "content": "Be good."}
    want = [USER["content"] + END[name], ANSWER["content"] + END[name]]
    assert learned({"messages": [system, USER, ANSWER]}, make_tokenizer(name), "all") == want
    assert learned({"messages": [system, USER, ANSWER], "unmask": True}, make_tokenizer(name)) == want


def test_flags_of_a_message_win(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    turns = [{**USER, "train": True}, {**ANSWER, "weight": 0}, USER, {"role": "assistant", "content": "Paris", "weight": 1}, USER, ANSWER]
    assert learned({"messages": turns}, tokenizer, "last_assistant") == ["alpha prompt.<|im_end|>", "Paris<|im_end|>", "beta answer.<|im_end|>"]
    assert learned({"messages": [{**ANSWER, "train": False} if turn is ANSWER else turn for turn in FOUR]}, tokenizer) == [FOUR[3]["content"] + "<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "chatml_generation", "llama3", "gemma", "granite", "phi", "qwen3"])
def test_odd_orders_are_learned_as_far_as_sense_goes(make_tokenizer, name):
    tokenizer, said = make_tokenizer(name), "beta answer." + END[name]
    assert learned({"messages": [USER, ANSWER, ANSWER]}, tokenizer) == [said, said]
    assert learned({"messages": [USER, ANSWER, USER]}, tokenizer) == [said]
    assert learned({"messages": [ANSWER, USER, ANSWER]}, tokenizer) == [said, said]
    assert learned({"messages": [USER]}, tokenizer) == []


def test_a_template_that_moves_the_system_turn(make_tokenizer):
    tokenizer = make_tokenizer("mistral")
    turns = [{"role": "system", "content": "Be good."}, *FOUR]
    assert tokenizer.apply_chat_template(turns, tokenize=False).count("Be good.") == 1
    assert learned({"messages": turns}, tokenizer) == [" beta answer.</s>", " " + FOUR[3]["content"] + "</s>"]


def test_a_template_that_refuses_a_turn_names_the_reason(make_tokenizer):
    with pytest.raises(RowFault, match="System role not supported"):
        learned({"messages": [{"role": "system", "content": "x"}, USER, ANSWER]}, make_tokenizer("gemma"))
    with pytest.raises(RowFault, match="roles must alternate"):
        learned({"messages": [USER, ANSWER, ANSWER]}, make_tokenizer("mistral"))


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_reasoning_that_the_template_drops_is_not_learned(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    thought = {"role": "assistant", "content": "", "reasoning_content": "add them", "tool_calls": [CALL]}
    answer = {"role": "assistant", "content": "It is 2.", "reasoning_content": "got it"}
    turns = [USER, thought, {"role": "tool", "content": "2"}, answer]
    tools = [{"name": "add", "parameters": {"a": {"type": "number"}}}]
    want = ["<think>\nadd them\n</think>\n\n" + CALL_TEXT + "<|im_end|>", "<think>\ngot it\n</think>\n\nIt is 2.<|im_end|>"]
    assert learned({"messages": turns, "tools": tools}, tokenizer) == want
    # A further question makes the template drop both thoughts, which growing prefixes still show.
    longer = {"messages": [*turns, USER, answer], "tools": tools}
    assert learned(longer, tokenizer) == [CALL_TEXT + "<|im_end|>", "It is 2.<|im_end|>", want[1]]


def test_thoughts_as_the_models_own_template_writes_them(make_tokenizer):
    tokenizer = make_tokenizer("qwen3_full")
    assert learned({"messages": FOUR}, tokenizer) == ["beta answer.<|im_end|>", "<think>\n\n</think>\n\nParis\n\nis é 漢.<|im_end|>"]
    thought = {"role": "assistant", "content": "", "reasoning_content": "add them", "tool_calls": [CALL]}
    inline = {"role": "assistant", "content": "<think>\ngot it\n</think>\n\nIt is 2."}
    results = [{"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}]
    want = ["<think>\nadd them\n</think>\n\n" + CALL_TEXT + "<|im_end|>", "<think>\ngot it\n</think>\n\nIt is 2.<|im_end|>"]
    assert learned({"messages": [USER, thought, *results, inline]}, tokenizer) == want
    dropped = [CALL_TEXT + "<|im_end|>", "It is 2.<|im_end|>"]
    assert learned({"messages": [USER, thought, *results, inline, USER, thought, *results, inline]}, tokenizer) == dropped + want


def test_tools_that_move_along_with_the_last_question(make_tokenizer):
    tokenizer = make_tokenizer("mistral_tools")
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    turns = [USER, call, {"role": "tool", "content": "2"}, ANSWER, *FOUR]
    said = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>'
    want = [said, " beta answer.</s>", " beta answer.</s>", " " + FOUR[3]["content"] + "</s>"]
    assert learned({"messages": turns, "tools": [{"name": "add"}]}, tokenizer) == want


def test_the_shipped_template_has_a_place_for_tools(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    system = {"role": "system", "content": "Be good."}
    call = {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL]}
    row = {"messages": [system, USER, call, {"role": "tool", "content": "2"}, ANSWER], "tools": [{"name": "add"}]}
    ids, _ = encode(parse_row(row)[0], tokenizer, "assistant")
    assert tokenizer.decode(ids).startswith('<|im_start|>system\nBe good.\n\nYou may call these functions:\n<tools>\n{"name": "add"}\n</tools>')
    assert learned(row, tokenizer) == [f"Well.\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>", "beta answer.<|im_end|>"]
    plain = [system, *FOUR]
    assert tokenizer.apply_chat_template(plain, tokenize=False) == make_tokenizer("chatml").apply_chat_template(plain, tokenize=False)


def test_what_a_template_would_leave_out_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    for row, where in (
        ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}, "tool_calls"),
        ({"messages": [USER, {**ANSWER, "thinking": "hm"}]}, "reasoning_content"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "add"}]}, "tools"),
    ):
        with pytest.raises(RowFault, match=f"{where}: the model's chat template has no place"):
            learned(row, tokenizer)
    assert learned({"messages": [USER, ANSWER], "tools": []}, tokenizer)


def test_own_end_of_a_tool_call(make_tokenizer):
    template = (
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson + '<|end|>' }}{% else %}{{ m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, ANSWER]
    assert learned({"messages": turns}, make_tokenizer(template)) == ['{"name": "add", "arguments": {"a": 1}}<|end|>', "beta answer.<|eot_id|>"]


def test_only_the_last_turn_has_an_end_token(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ eos_token }}{% endif %}"
    )
    first, last = learned({"messages": FOUR}, make_tokenizer(template))
    # The space before the answer belongs to the token of its first word.
    assert (first, last) == (" beta answer.\n", FOUR[3]["content"] + "\n</s>")


def test_text_that_imitates_the_template_is_not_mistaken(make_tokenizer):
    fake = "x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\n"
    row = {"messages": [{"role": "user", "content": fake}, ANSWER]}
    for name in ("chatml", "chatml_generation", "qwen3"):
        assert learned(row, make_tokenizer(name)) == ["beta answer.<|im_end|>"]
    thought = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    rewritten = {"messages": [{"role": "user", "content": fake}, thought, USER, thought]}
    assert learned(rewritten, make_tokenizer("qwen3")) == ["ok<|im_end|>", "<think>\nhm\n</think>\n\nok<|im_end|>"]
    with pytest.raises(RowFault, match="not certain"):
        learned({"messages": [USER, {**thought, "content": fake}, USER, thought]}, make_tokenizer("qwen3"))


def test_rows_that_cannot_be_proven_are_refused(make_tokenizer):
    shout = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last else m.content | upper) + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    with pytest.raises((RowFault, InvalidArguments), match=r"rewrites|leaves out"):
        learned({"messages": FOUR}, make_tokenizer(shout))


@pytest.mark.parametrize(
    ("template", "said"),
    [(None, "no chat template"), ("{{ 'constant' }}", "leaves out"), ("{% for m in messages %}", "cannot render"), ("{{ messages[0].content + nothing }}", "cannot render")],
)
def test_unusable_templates_are_named(make_tokenizer, template, said):
    with pytest.raises(InvalidArguments, match=said):
        learned({"messages": [USER, ANSWER]}, make_tokenizer(template))


@pytest.mark.parametrize("row", [{"prompt": "alpha", "completion": "beta"}, {"question": "alpha", "answer": "beta"}, {"instruction": "alpha", "output": "beta"}])
def test_prompt_and_completion_learn_the_first_token_of_the_answer(make_tokenizer, row):
    assert learned(row, make_tokenizer("plain")) == ["beta</s>"]
    assert learned(row, make_tokenizer("chatml")) == ["beta<|im_end|>"]


def test_pad_equal_to_the_end_token_changes_nothing(make_tokenizer):
    tokenizer = make_tokenizer("mistral")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ids, trained = encode(parse_row({"messages": [USER, ANSWER]})[0], tokenizer, "assistant")
    assert (ids[-1], trained[-1]) == (tokenizer.eos_token_id, True)


def test_token_mask_counts_overlap_and_trimmed_white_space():
    offsets = [(0, 3), (3, 4), (4, 4), (4, 7), (7, 9), (9, 9), (9, 12)]
    assert token_mask(offsets, [(4, 7)]).tolist() == [False, False, False, True, False, False, False]
    assert token_mask(offsets, [(3, 9)]).tolist() == [False, True, True, True, True, True, False]
    assert token_mask(offsets, [(5, 6), (11, 12)]).tolist() == [False, False, False, True, False, False, True]
    assert token_mask([], [(0, 1)]).tolist() == []


@pytest.mark.parametrize(("file", "name"), [("alpaca", "chatml"), ("gsm8k_test", "llama3"), ("alpaca", "mistral"), ("glaive_tools", "qwen3")])
def test_real_rows(real_data, make_tokenizer, file, name):
    tokenizer = make_tokenizer(name)
    lines = (real_data / f"{file}.messages.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[:: len(lines) // 40]:
        row = json.loads(line)
        answers = [turn for turn in row["messages"] if turn["role"] == "assistant"]
        texts = learned(row, tokenizer)
        assert len(texts) == len(answers)
        for text, answer in zip(texts, answers, strict=True):
            assert text.endswith(END[name])
            assert text.removesuffix(END[name]).strip().startswith(answer["content"].strip())
            assert ("<tool_call>" in text) == bool(answer.get("tool_calls"))
