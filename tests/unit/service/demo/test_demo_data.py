"""The sample data: enough of it, well formed, and free of the questions that are asked afterwards."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from posttrain_service.cli.demo import DATA, QUESTIONS, RECIPE
from posttrain_service.wire.jobs import JobRequest

ROWS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def said(role: str) -> list[str]:
    return [message["content"] for row in ROWS for message in row["messages"] if message["role"] == role]


def test_there_are_enough_conversations_that_alternate() -> None:
    assert len(ROWS) >= 120
    for row in ROWS:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert set(row) == {"messages"}


def test_no_question_is_asked_twice_and_each_fact_in_many_ways() -> None:
    assert [question for question, times in Counter(said("user")).items() if times > 1] == []
    singles = Counter(row["messages"][1]["content"] for row in ROWS if len(row["messages"]) == 2)
    assert len(singles) >= 20
    assert min(singles.values()) >= 5


@pytest.mark.parametrize(("question", "fact"), QUESTIONS)
def test_what_is_asked_afterwards_is_known_but_not_in_these_words(question: str, fact: str) -> None:
    assert question.lower() not in {text.lower() for text in said("user")}
    assert any(fact.lower() in text.lower() for text in said("assistant"))
    assert fact.lower() not in question.lower()


def test_the_recipe_is_a_valid_request() -> None:
    request = JobRequest(model="m", dataset="file-1", **RECIPE)
    assert request.adapter is not None
