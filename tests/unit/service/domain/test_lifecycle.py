"""The tables of states, verbs and outward names."""

import itertools

import pytest

from posttrain_service.domain.lifecycle import (
    LIVE,
    MOVES,
    REASON_STATE,
    TERMINAL,
    EndReason,
    JobState,
    answer,
    check_move,
    check_verb,
    is_live,
    is_terminal,
    llama_stack_status,
    openai_status,
)
from posttrain_service.errors import Conflict

S = JobState

ALLOWED = {
    "queued": "launching paused cancelled failed",
    "launching": "running queued failed stopping succeeded",
    "running": "stopping succeeded failed paused",
    "stopping": "cancelled paused succeeded failed",
    "paused": "queued cancelled",
    "succeeded": "",
    "failed": "queued",
    "cancelled": "queued",
}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(JobState, JobState)))
def test_moves(source, target):
    if target.value in ALLOWED[source.value].split():
        check_move(source, target)
    else:
        with pytest.raises(Conflict, match=f"{source} cannot become {target}") as caught:
            check_move(source, target)
        assert caught.value.code == "illegal_move"


def test_every_state_is_reached_and_ends_somewhere():
    assert set(MOVES) == set(JobState)
    assert set().union(*MOVES.values()) == set(JobState)
    for state in JobState:
        seen, todo = set(), {state}
        while todo:
            seen |= todo
            todo = set().union(*(MOVES[s] for s in todo)) - seen
        assert seen & TERMINAL, f"{state} leads nowhere"


def test_live_and_terminal_states():
    assert {s for s in JobState if is_terminal(s)} == TERMINAL == {S.SUCCEEDED, S.FAILED, S.CANCELLED}
    assert {s for s in JobState if is_live(s)} == LIVE == {S.LAUNCHING, S.RUNNING, S.STOPPING}


VERBS = {
    # state, want of the stop, service's reason for it: cancel, pause, resume, retry, delete (a = acts, d = done already, r = refused)
    (S.QUEUED, None): "a a d d r",
    (S.LAUNCHING, None): "a a d d r",
    (S.RUNNING, None): "a a d d r",
    (S.STOPPING, "cancel"): "d r r r r",
    (S.STOPPING, "pause"): "a d r r r",
    (S.STOPPING, None): "a r r r r",
    (S.STOPPING, "pause", EndReason.PREEMPTED): "a a d r r",
    (S.STOPPING, "cancel", EndReason.MAX_DURATION): "d r r r r",
    (S.STOPPING, None, EndReason.MAX_DURATION): "a r r r r",
    (S.PAUSED, "pause"): "a d a r r",
    (S.SUCCEEDED, None): "r r r r a",
    (S.FAILED, None): "r r r a a",
    (S.CANCELLED, "cancel"): "d r r a a",
}


@pytest.mark.parametrize("row", VERBS)
def test_verbs(row):
    letters = VERBS[row].split()
    for verb, letter in zip(("cancel", "pause", "resume", "retry", "delete"), letters, strict=True):
        assert answer(verb, *row)[0] == letter, verb


def test_verb_errors_say_what_the_job_is():
    assert check_verb("cancel", "j1", S.RUNNING)
    assert not check_verb("cancel", "j1", S.CANCELLED)
    with pytest.raises(Conflict, match="cannot cancel job j1: it is succeeded; only") as caught:
        check_verb("cancel", "j1", S.SUCCEEDED)
    assert caught.value.code == "cannot_cancel"
    assert not caught.value.should_retry


def test_every_reason_leads_to_a_state():
    assert set(REASON_STATE) == set(EndReason)
    assert {r for r, s in REASON_STATE.items() if s is S.SUCCEEDED} == {EndReason.COMPLETED}
    assert {r for r, s in REASON_STATE.items() if s is S.CANCELLED} == {EndReason.CANCELLED, EndReason.PAUSED_EXPIRED}
    assert {r for r, s in REASON_STATE.items() if s is S.PAUSED} == {EndReason.PAUSED, EndReason.PREEMPTED, EndReason.DISK_FULL}
    assert not set(REASON_STATE.values()) & {S.QUEUED, *LIVE}


@pytest.mark.parametrize(
    ("state", "openai", "llama_stack"),
    [
        ("queued", "queued", "scheduled"),
        ("launching", "queued", "scheduled"),
        ("running", "running", "in_progress"),
        ("stopping", "running", "in_progress"),
        ("paused", "paused", "scheduled"),
        ("succeeded", "succeeded", "completed"),
        ("failed", "failed", "failed"),
        ("cancelled", "cancelled", "cancelled"),
    ],
)
def test_outward_names(state, openai, llama_stack):
    assert openai_status(JobState(state)) == openai
    assert llama_stack_status(JobState(state)) == llama_stack
    validating = openai_status(JobState(state), validating=True)
    assert validating == ("validating_files" if state == "queued" else openai)
