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
