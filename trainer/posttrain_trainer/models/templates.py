"""Chat templates that ship with the trainer, for models that have none; named in a job, never a silent default."""

from __future__ import annotations

from posttrain_trainer.contract.errors import InvalidArguments

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""OpenAI's chat markup: `<|im_start|>role`, content, `<|im_end|>`; needs a model that knows these two tokens."""

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
