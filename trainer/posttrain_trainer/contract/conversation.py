"""What rows mean, whatever their shape: a Conversation, a Preference or a Document, and which turns of them are learned.

Standard library only. How each shape becomes one of the three stands in `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from posttrain_trainer.contract.messages import Message

TrainOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, and the tools that were on offer."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    unmask: bool = False
    """Train on every turn but the system's, whatever `train_on` says."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, the first better than the second."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text to go on training with."""

    text: str


Row = Conversation | Preference | Document
Kind = Literal["conversation", "preference", "document"]


def kind_of(row: Row) -> Kind:
    """Which of the three a row is."""
    if isinstance(row, Conversation):
        return "conversation"
    return "preference" if isinstance(row, Preference) else "document"


def trained_turns(row: Conversation, train_on: TrainOn) -> list[int]:
    """Numbers of the turns to learn: a message's own flag, else the row's `unmask`, else `train_on`."""
    last = max((k for k, message in enumerate(row.messages) if message.role == "assistant"), default=-1)
    chosen = []
    for k, message in enumerate(row.messages):
        if message.train is not None:
            wanted = message.train
        elif row.unmask or train_on == "all":
            wanted = message.role != "system"
        else:
            wanted = message.role == "assistant" if train_on == "assistant" else k == last
        if wanted:
            chosen.append(k)
    return chosen


def is_learned(turn: Message) -> bool:
    """Whether a turn of one of two answers is learned: an assistant's, unless its own flag says no."""
    return turn.role == "assistant" and turn.train is not False


def useless(row: Row, train_on: TrainOn) -> str | None:
    """Why nothing can be learned from a row, with the remedy; None where something can."""
    if isinstance(row, Document):
        return None if row.text.strip() else "the text is empty; leave the row out"
    if isinstance(row, Preference):
        for name, answer in (("chosen", row.chosen), ("rejected", row.rejected)):
            if not any(is_learned(turn) for turn in answer):
                return f"{name}: has no turn of the assistant to learn from"
        return None
    if trained_turns(row, train_on):
        return None
    if train_on != "all" and not row.unmask and all(message.role != "assistant" for message in row.messages):
        return "has no turn of the assistant, so nothing can be learned from it; add the answer, or leave the row out"
    return "every turn is left out of the training (train or weight, role, train_on), so nothing can be learned; leave the row out"
