"""The tokenizer with its chat template and a padding token."""

from __future__ import annotations

from typing import Any

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.models.source import find_model, read_tokenizer
from posttrain_trainer.models.templates import SHIPPED, resolve_template


def load_tokenizer(args: FullTrainingArguments) -> Any:
    """The model's tokenizer; `args.chat_template` goes before its own template, and is what an export carries.

    A tokenizer without padding token pads with its end token: padding is masked by position, never by id.

    Raises:
        ModelNotFound: No tokenizer there.
        InvalidArguments: Neither model nor arguments have a chat template (pretrain needs none), or there is no end token.
    """
    tokenizer = read_tokenizer(find_model(args.model_path))
    if args.chat_template is not None:
        tokenizer.chat_template = resolve_template(args.chat_template)
    if not tokenizer.chat_template and args.method.kind != "pretrain":
        raise InvalidArguments(
            f"model {args.model_path} has no chat template; name one by chat_template ({', '.join(sorted(SHIPPED))}, or Jinja text)"
        )
    if tokenizer.eos_token_id is None:
        raise InvalidArguments(f"the tokenizer of {args.model_path} names no end token (eos_token); without it no answer ends")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
