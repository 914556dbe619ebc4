"""Errors say what to do, ids are safe as names, clocks stand still when told to."""

import time

import pytest

from posttrain_service import errors, ids
from posttrain_service.clock import ManualClock, SystemClock
from posttrain_service.errors import InvalidRequest, NotFound, QuotaExceeded, ServiceError, StoreBusy

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ServiceError)]


def test_each_error_has_a_code_of_its_own():
    codes = [cls.code for cls in CLASSES]
    assert len(CLASSES) >= 12
    assert len(set(codes)) == len(codes)
    for cls in CLASSES:
        error = cls("what is wrong")
        assert (error.code, error.message, str(error)) == (cls.code, "what is wrong", "what is wrong")
        assert error.should_retry == (error.retry_after_s is not None), "who may try again is told when"


def test_details_of_an_error():
    rows = [{"line": 3, "loc": "messages", "message": "is empty"}]
    error = InvalidRequest("bad rows", code="invalid_rows", param="dataset", errors=rows)
    assert (error.code, error.param, error.errors) == ("invalid_rows", "dataset", rows)
    assert InvalidRequest.code == "invalid_request", "a finer code is the instance's alone"
    assert StoreBusy("x").retry_after_s == 1.0
    assert QuotaExceeded("x", retry_after_s=5.0).retry_after_s == 5.0
    assert NotFound("x").retry_after_s is None
    assert not NotFound("x").should_retry


@pytest.mark.parametrize("text", ["a", "0", "A.b_c-d", "x" * 128, "4bb4a511-52e0-4009-a8fa-d835fc52c211"])
def test_ids_that_clients_may_choose(text):
    assert ids.check_job_uuid(text) == text


@pytest.mark.parametrize("text", ["", ".", "..", "-a", "_a", "a/b", "a b", "a\n", "a\x00", "ä", "x" * 129, "../../etc"])
def test_ids_that_they_may_not(text):
    with pytest.raises(InvalidRequest, match="is not allowed") as caught:
        ids.check_job_uuid(text)
    assert caught.value.code == "invalid_job_uuid"
    assert caught.value.param == "job_uuid"
    assert not ids.is_run_id(text)
    assert not ids.is_file_id(text)


def test_made_ids_have_their_form_and_differ():
    assert ids.is_run_id(ids.new_run_id())
    assert ids.is_file_id(ids.new_file_id())
    assert not ids.is_file_id(ids.new_run_id())
    assert not ids.is_run_id(ids.new_run_id() + "\n")
    assert not ids.is_run_id(ids.new_run_id().upper().replace("0", "A"))
    for make in (ids.new_run_id, ids.new_file_id, ids.new_request_id, ids.new_holder_id):
        assert make() != make()
        assert len(make()) <= 64


def test_clocks():
    assert abs(SystemClock().now() - time.time()) < 5
    clock = ManualClock(10.0)
    assert clock.now() == 10.0
    assert clock.advance(2.5) == clock.now() == 12.5
    with pytest.raises(AssertionError):
        clock.advance(-1)
