"""Chat templates that ship with the trainer, for models that have none; named in a job, never a silent default."""

from __future__ import annotations

from posttrain_trainer.contract.errors import InvalidArguments

CHATML = (
    "{% set skip = 1 if tools and messages[0]['role'] == 'system' else 0 %}"
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if skip %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ 'You may call these functions:\n<tools>' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools>\nA call is one JSON object with name and arguments between <tool_call> and </tool_call>.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages[skip:] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first else '' }}{{ '<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""OpenAI's chat markup: `<|im_start|>role`, content, `<|im_end|>`; needs a model that knows these two tokens.

Tools and calls are written as JSON in tags, as Hermes and Qwen 2.5 have them; without any it is plain ChatML.
"""

SHIPPED: dict[str, str] = {"chatml": CHATML}
"""Name -> Jinja text."""


def resolve_template(value: str) -> str:
    """The Jinja text for a shipped name or for Jinja text itself.

    Raises:
        InvalidArguments: Neither a shipped name nor Jinja (text without `{{` or `{%` would render the same
            constant for every conversation).
    """
    if value in SHIPPED:
        return SHIPPED[value]
    if "{{" in value or "{%" in value:
        return value
    raise InvalidArguments(
        f"chat_template {value!r} is neither a shipped name ({', '.join(sorted(SHIPPED))}) nor Jinja text; give one of them"
    )
