"""What an attempt's records mean."""

import pytest

from posttrain_service.domain.lifecycle import REASON_STATE, EndReason
from posttrain_service.domain.outcome import outcome, reason_of
from posttrain_trainer.contract import errors as trainer_errors

FULL = {"code": "disk_full", "message": "a checkpoint needs more", "rank": 0, "details": {}}
OOM = {"code": "out_of_memory", "message": "CUDA out of memory", "rank": 1, "details": {"bytes": 5}}
COMPLETED = {"status": "completed", "steps": 7, "warnings": ["w"]}
SAVED = {"status": "stopped", "want": "pause", "checkpoint": "step-000004"}


def exited(code=1, **more):
    return {"reason": "exited", "exit_code": code, "signal": None, **more}


TABLE = [
    # (state, want, service's reason), (exit, result, error), expected reason
    (("running", None, None), (exited(0), COMPLETED, None), "completed"),
    (("running", None, None), (None, COMPLETED, None), "completed"),  # only the shim was killed
    (("stopping", "cancel", None), (exited(0), COMPLETED, None), "completed"),  # it was faster
    (("stopping", None, "max_duration"), (exited(0), COMPLETED, None), "completed"),
    (("running", None, None), (exited(1), COMPLETED, OOM), "completed"),  # a rank failed after the last step
    (("running", None, None), (exited(1), None, OOM), "out_of_memory"),
    (("running", None, None), (None, None, OOM), "out_of_memory"),
    (("stopping", "cancel", None), (exited(1), None, OOM), "out_of_memory"),  # before the cancel was obeyed
    (("stopping", "cancel", None), ({"reason": "stopped", "stop_want": "cancel"}, None, OOM), "cancelled"),
    (("stopping", "cancel", None), ({"reason": "killed", "stop_want": "cancel"}, None, OOM), "cancelled"),
    (("stopping", "cancel", None), (None, None, OOM), "cancelled"),
    (("stopping", "cancel", None), (None, None, None), "cancelled"),
    (("stopping", "cancel", None), ({"reason": "stopped", "stop_want": "cancel", "exit_code": 1}, None, None), "cancelled"),
    (("stopping", "pause", None), ({"reason": "stopped", "stop_want": "pause", "exit_code": 1}, SAVED, None), "paused"),
    (("stopping", "pause", None), ({"reason": "killed", "stop_want": "pause"}, None, None), "paused"),
    (("stopping", "pause", None), ({"reason": "killed", "stop_want": "pause"}, None, OOM), "paused"),
    (("stopping", "pause", None), ({"reason": "stopped", "stop_want": "pause"}, None, OOM), "out_of_memory"),
    (("stopping", None, "heartbeat_timeout"), ({"reason": "killed", "stop_want": "cancel"}, None, None), "heartbeat_timeout"),
    (("stopping", None, "heartbeat_timeout"), ({"reason": "killed", "stop_want": "cancel"}, None, OOM), "heartbeat_timeout"),
    (("stopping", None, "heartbeat_timeout"), (exited(1), None, OOM), "out_of_memory"),
    (("stopping", None, "max_duration"), ({"reason": "stopped", "stop_want": "pause"}, SAVED, None), "max_duration"),
    (("stopping", "cancel", "max_duration"), ({"reason": "stopped", "stop_want": "cancel"}, SAVED, None), "cancelled"),
    (("stopping", "pause", "preempted"), ({"reason": "stopped", "stop_want": "pause"}, SAVED, None), "preempted"),
    (("stopping", "pause", "preempted"), ({"reason": "killed", "stop_want": "pause"}, None, None), "preempted"),
    (("stopping", "pause", "preempted"), (exited(0), COMPLETED, None), "completed"),
    (("stopping", "pause", "preempted"), (exited(1), None, OOM), "out_of_memory"),
    (("running", None, None), (exited(1), SAVED, None), "preempted"),  # SIGTERM to torchrun from outside
    (("running", None, None), ({"reason": "stopped", "stop_want": None}, SAVED, None), "preempted"),
    (("running", None, None), ({"reason": "stopped", "stop_want": None}, None, None), "lost"),
    (("running", None, None), (exited(None, signal=9), None, None), "lost"),
    (("running", None, None), (exited(1), None, None), "trainer_error"),
    (("running", None, None), (exited(0), None, None), "trainer_error"),
    (("running", None, None), (None, None, None), "lost"),
    (("running", None, None), ({"reason": "supervision_failed", "message": "OSError: x"}, None, None), "lost"),
    (("launching", None, None), ({"reason": "launch_failed", "message": "no python"}, None, None), "launch_failed"),
    (("running", None, None), (exited(1), None, {"code": "novel", "message": "?"}), "trainer_error"),
    (("running", None, None), (exited(1), None, FULL), "disk_full"),
    (("stopping", "pause", None), ({"reason": "stopped", "stop_want": "pause"}, None, FULL), "disk_full"),
    (("stopping", "pause", "preempted"), (exited(1), None, FULL), "disk_full"),
    (("stopping", "cancel", None), (exited(1), None, FULL), "cancelled"),  # nobody wants it to go on
    (("stopping", None, "max_duration"), (exited(1), None, FULL), "max_duration"),
]


@pytest.mark.parametrize(("who", "records", "reason"), TABLE)
def test_table(make_job, look, who, records, reason):
    state, want, own = who
    exit_record, result, error = records
    job = make_job(state, want=want, reason=None if own is None else EndReason(own))
    beat = {"time": 1.0, "phase": "train", "step": 3}
    end = outcome(job, look("dead", exit=exit_record, result=result, error=error, heartbeat=beat))
    assert end.reason == reason
    assert end.state is REASON_STATE[end.reason]
    assert end.message
    assert (end.error is not None) == (end.state == "failed")


def test_an_error_keeps_the_trainers_own_words(make_job, look):
    end = outcome(make_job(), look("dead", exit=exited(1, leftovers_killed=2), error=OOM))
    assert end.error == {"code": "out_of_memory", "message": "CUDA out of memory", "rank": 1, "log_tail": None}
    assert end.data == {"exit_code": 1, "leftovers_killed": 2, "exit_reason": "exited", "details": {"bytes": 5}}


def test_exit_before_any_heartbeat_is_a_failed_launch(make_job, look):
    end = outcome(make_job(), look("dead", exit=exited(1)))
    assert end.reason is EndReason.LAUNCH_FAILED
    assert "exit code 1" in end.message


def test_facts_of_a_killed_launcher(make_job, look):
    end = outcome(make_job(), look("dead", exit=exited(None, signal=9), heartbeat={"step": 4}))
    assert "9 (SIGKILL)" in end.message
    assert end.data["signal"] == 9
    assert end.data["steps"] == 4


def test_a_pause_that_could_not_save_says_so(make_job, look):
    killed = look("dead", exit={"reason": "killed", "stop_want": "pause"})
    [warning] = outcome(make_job("stopping", want="pause"), killed).warnings
    assert "last complete checkpoint" in warning
    saved = outcome(make_job("stopping", want="pause"), look("dead", exit={"reason": "stopped"}, result=SAVED))
    assert saved.warnings == []
    assert "step-000004" in saved.message


def test_every_code_of_the_trainer_has_a_reason():
    codes = {
        cls.code for cls in vars(trainer_errors).values()
        if isinstance(cls, type) and issubclass(cls, trainer_errors.TrainerError)
    }  # fmt: skip
    assert len(codes) > 8
    assert {str(reason_of(code)) for code in codes} == codes
    for not_a_failure in ("completed", "cancelled", "paused", None, 3):
        assert reason_of(not_a_failure) is EndReason.TRAINER_ERROR
