"""A small byte-level tokenizer and the templates of the common model families, written for these tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_END = "{% if add_generation_prompt %}"
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "chatml_generation": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
        "{{ '\n' }}{% endfor %}" + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "chatml_generation_without_end": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "chatml_generation_with_newline": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}" + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
        "{% endfor %}" + _END + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (  # the system turn goes into the last user turn, so earlier turns change as a conversation grows
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
        "{% else %}{% set turns = messages %}{% endif %}"
        "{% set last = turns | selectattr('role', 'equalto', 'user') | list | last %}"
        "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + (system + '\n\n' if system is defined and m == last else '') + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
        "{% endfor %}" + _END + "{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "granite": (
        "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% endfor %}"
        + _END + "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        + _END + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "qwen3": (  # drops the reasoning of turns before the last question
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% if loop.index0 > ns.last and m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen3_full": (  # the model's own rules: a thought for each answer after the last question, tool turns as a user's
        "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for t in tools %}{{- t | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
        "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
        "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not(message.content.startswith('<tool_response>')"
        " and message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}"
        "{%- endfor %}{%- for message in messages %}{%- set content = message.content %}"
        "{%- if message.role == 'user' or message.role == 'system' %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}"
        "{%- elif message.role == 'assistant' %}{%- set reasoning_content = '' %}"
        "{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}"
        "{%- elif '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}"
        "{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}"
        "{%- for tool_call in message.tool_calls or [] %}{%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}"
        "{{- '<tool_call>\n{\"name\": \"' + tool_call.function.name + '\", \"arguments\": ' + tool_call.function.arguments | tojson + '}\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>\n' }}"
        "{%- elif message.role == 'tool' %}{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}"
        "{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "mistral_tools": (  # tools stand before the last question, so every earlier prefix differs from the whole
        "{{ bos_token }}{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if tools and m == last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}"
        "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ ']' + eos_token }}"
        "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    ),
    "r1": (  # opens the answer by a tag that the rendered answer need not have
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}{% else %}"
        "{{ '<Assistant>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
        + _END + "{{ '<Assistant><think>\n' }}{% endif %}"
    ),
    "plain": "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
}
SPECIAL = [
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|end|>", "<|user|>", "<|assistant|>",
]  # fmt: skip
CORPUS = ["alpha prompt. beta answer. What is the capital of France? Paris is the capital. user assistant system model\n\n"] * 4


@cache
def _tokenizer(*, special: bool, trim_offsets: bool) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.add_special_tokens([AddedToken(token, special=True) for token in (SPECIAL if special else ["<s>", "</s>"])])
    # Like many real ones, it would put <s> in front when asked for special tokens.
    single = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), single])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", clean_up_tokenization_spaces=False)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Name of a template -> a tokenizer with it; `special=False`: its markers are ordinary text to the tokenizer."""

    def make(template: str | None, *, special: bool = True, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
        tokenizer = _tokenizer(special=special, trim_offsets=trim_offsets)
        tokenizer.chat_template = TEMPLATES.get(template, template) if template else None
        return tokenizer

    return make
