"""Every failure is told by the rank that had it, in the contract's words, and leaves no process behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from posttrain_trainer.contract.errors import InvalidData, Lost, ModelNotFound, TrainerError
from posttrain_trainer.contract.proc import send
from posttrain_trainer.contract.rundir import ENV_RUN_ID, RunDir, read_json

from .conftest import alive, steps_done, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # minutes only where others use the machine as well


def test_a_folder_that_is_no_model(lab, tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with pytest.raises(ModelNotFound) as caught:
        lab.train(tmp_path / "run", 2, model_path=str(tmp_path / "nothing"))
    assert "nothing" in caught.value.message
    assert caught.value.exit_code == 1
    errors = RunDir(tmp_path / "run").attempt(1).errors()
    assert {error["code"] for _, error in errors} == {"model_not_found"}
    assert read_json(RunDir(tmp_path / "run").attempt(1).result) is None
    assert list((tmp_path / "temporary").iterdir()) == [], "torchrun left something behind"


def test_bad_rows_are_told_with_their_lines_by_the_rank_that_read_them(lab, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(lab.rows.read_text() + '{"messages": "none"}\n{"messages": [\n')
    with pytest.raises(InvalidData) as caught:
        lab.train(tmp_path / "run", 2, data_path=str(rows))
    assert [error["line"] for error in caught.value.details["errors"]] == [41, 42]
    assert [rank for rank, _ in RunDir(tmp_path / "run").attempt(1).errors()] == [0]


def test_a_killed_rank_is_a_loss_not_a_stop(lab, tmp_path):
    process, attempt, run_id = lab.start(tmp_path, 2, num_epochs=500)
    wait_for(lambda: steps_done(attempt) >= 2, "the second step")
    kill_rank(run_id, 1)
    assert process.wait(timeout=60) != 0
    assert alive(run_id) == []
    assert read_json(attempt.result) is None
    (rank, error), *rest = attempt.errors()
    assert (rank, error["code"], rest) == (0, "lost", [])


def test_a_rank_killed_while_starting_is_a_loss_not_a_stop(lab, tmp_path):
    process, attempt, run_id = lab.start(tmp_path, 2)
    wait_for(lambda: attempt.rank_log(1).exists() and attempt.rank_log(0).exists() and attempt.heartbeat.exists(), "both ranks")
    kill_rank(run_id, 1)
    assert process.wait(timeout=60) != 0
    assert alive(run_id) == []
    assert read_json(attempt.result) is None
    assert [error["code"] for _, error in attempt.errors()] == ["lost"]


def test_killing_the_launcher_leaves_no_rank(lab, tmp_path):
    launcher = lab.launcher(tmp_path, 2, num_epochs=500)
    attempt = RunDir(tmp_path).attempt(1)
    wait_for(lambda: steps_done(attempt) >= 1, "the first step")
    run_id = marker_of_child(launcher.pid)
    assert len(alive(run_id)) >= 3
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not alive(run_id), "the end of all ranks", timeout_s=5.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_saves_and_leaves_no_rank(lab, tmp_path, number):
    launcher = lab.launcher(tmp_path, 2, num_epochs=500, save_every_epoch=False)
    attempt = RunDir(tmp_path).attempt(1)
    wait_for(lambda: steps_done(attempt) >= 1, "the first step")
    run_id = marker_of_child(launcher.pid)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert alive(run_id) == []
    result = read_json(attempt.result)
    assert (result["status"], result["want"]) == ("stopped", "pause")
    assert RunDir(tmp_path).checkpoint_ids() == [result["checkpoint"]]
    if number == signal.SIGTERM:
        assert launcher.returncode == 0
        assert json.loads(out)["steps"] == result["steps"]
    else:
        assert launcher.returncode != 0
        assert b"KeyboardInterrupt" in err


def test_train_torchrun_tells_of_a_killed_rank(lab, tmp_path, monkeypatch):
    import threading

    attempt = RunDir(tmp_path).attempt(1)

    def kill_soon() -> None:
        wait_for(lambda: steps_done(attempt) >= 2, "the second step")
        kill_rank(marker_of_child(os.getpid()), 0)

    thread = threading.Thread(target=kill_soon)
    thread.start()
    with pytest.raises(TrainerError) as caught:
        lab.train(tmp_path, 1, num_epochs=500)
    thread.join()
    assert isinstance(caught.value, Lost)
    assert (caught.value.rank, caught.value.exit_code) == (0, -9)


def kill_rank(run_id: str, rank: int) -> None:
    """SIGKILL one rank, as the system does when memory is short."""
    for identity in alive(run_id):
        environ = Path(f"/proc/{identity.pid}/environ").read_text().split("\0")
        if f"RANK={rank}" in environ:
            assert send(identity, signal.SIGKILL)
            return
    raise AssertionError(f"rank {rank} is not there")


def marker_of_child(pid: int) -> str:
    """The run id that the launcher `pid` gave to its torchrun."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        for item in Path(f"/proc/{child}/environ").read_text().split("\0"):
            if item.startswith(f"{ENV_RUN_ID}="):
                return item.partition("=")[2]
    raise AssertionError("the launcher has no marked child")
