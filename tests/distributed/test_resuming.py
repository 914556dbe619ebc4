"""Going on is the same as never having stopped, bit for bit; damage falls back; stop requests lose nothing."""

import os
import signal

import pytest

from posttrain_trainer.contract.errors import CheckpointInvalid, InvalidArguments
from posttrain_trainer.contract.rundir import RunDir, read_json, write_json
from posttrain_trainer.testing import tiny_rows, write_rows

from .conftest import alive, copy_run, events, losses, phase, points, steps_done, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # minutes only where others use the machine as well


def weights(run_dir: RunDir, name: str = "step-000010") -> bytes:
    return (run_dir.checkpoint(name) / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_steps_are_bit_equal(lab, unbroken, tmp_path, ranks):
    whole = unbroken(ranks)
    run_dir = copy_run(whole, tmp_path / "run", drop=("step-000010",))
    result = lab.train(run_dir.path, ranks)
    assert (result.status, result.steps, result.samples_seen) == ("completed", 10, 80)
    resumed, before = losses(run_dir, attempt=2), losses(whole)
    assert resumed == {step: before[step] for step in range(6, 11)}
    assert weights(run_dir) == weights(whole)


def test_another_number_of_ranks_goes_on_with_the_same_samples(lab, unbroken, tmp_path):
    run_dir = copy_run(unbroken(2), tmp_path / "run", drop=("step-000010",))
    lab.train(run_dir.path, 1)
    before = {point["step"]: point for point in points(unbroken(2))}
    for point in points(run_dir, attempt=2):
        same = before[point["step"]]
        assert (point["tokens"], point["supervised_tokens"], point["epoch"]) == (same["tokens"], same["supervised_tokens"], same["epoch"])
        assert point["loss"] == pytest.approx(same["loss"], abs=1e-4)


def test_a_truncated_newest_checkpoint_falls_back_to_the_one_before(lab, unbroken, tmp_path):
    run_dir = copy_run(unbroken(1), tmp_path / "run")
    path = run_dir.checkpoint("step-000010") / "model" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    result = lab.train(run_dir.path)
    assert list(losses(run_dir, attempt=2)) == [6, 7, 8, 9, 10]
    assert any("step-000010" in warning and "bytes instead of" in warning for warning in result.warnings)
    assert weights(run_dir) == weights(unbroken(1))
    assert run_dir.checkpoint_ids() == ["step-000005", "step-000010"]


def test_a_finished_run_has_nothing_to_do_and_other_arguments_are_refused(lab, unbroken, tmp_path):
    run_dir = copy_run(unbroken(1), tmp_path / "run")
    result = lab.train(run_dir.path)
    assert (result.status, result.steps, result.checkpoint) == ("completed", 10, "step-000010")
    assert points(run_dir, attempt=2) == []
    with pytest.raises(InvalidArguments, match="other arguments"):
        lab.train(run_dir.path, learning_rate=5e-4)
    with pytest.raises(CheckpointInvalid, match="no checkpoint step-000007"):
        lab.train(run_dir.path, resume="step-000007")


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_writes_a_checkpoint_from_which_the_run_ends_as_if_unbroken(lab, unbroken, tmp_path, ranks):
    out = tmp_path / "run"
    process, attempt, run_id = lab.start(out, ranks)
    wait_for(lambda: steps_done(attempt) >= 2, "the second step")
    process.terminate()
    process.wait(timeout=60)
    assert alive(run_id) == []
    assert attempt.errors() == []
    result = read_json(attempt.result)
    assert (result["status"], result["want"]) == ("stopped", "pause")
    stopped_at = result["steps"]
    assert 2 <= stopped_at < 10
    run_dir = RunDir(out)
    assert result["checkpoint"] == run_dir.checkpoint_ids()[-1]
    assert run_dir.manifest(result["checkpoint"])["step"] == stopped_at
    assert lab.train(out, ranks).status == "completed"
    together = losses(run_dir, 1) | losses(run_dir, 2)
    assert together == losses(unbroken(ranks))
    assert weights(run_dir) == weights(unbroken(ranks))


def test_an_adapter_with_dropout_stops_by_sigterm_and_resumes_exactly(lab, tmp_path):
    knobs = {"lora": {"rank": 2, "dropout": 0.2}, "num_epochs": 4, "save_every_steps": 7}
    lab.train(tmp_path / "whole", 2, **knobs)
    process, attempt, _ = lab.start(tmp_path / "run", 2, **knobs)
    wait_for(lambda: steps_done(attempt) >= 2, "the second step")
    process.terminate()
    process.wait(timeout=120)
    result = read_json(attempt.result)
    assert (result["status"], result["want"], attempt.errors()) == ("stopped", "pause", [])
    assert 2 <= result["steps"] < 20
    run_dir = RunDir(tmp_path / "run")
    lab.train(run_dir.path, 2, **knobs)
    assert list(losses(run_dir, 2)) == list(range(result["steps"] + 1, 21))
    assert losses(run_dir, 1) | losses(run_dir, 2) == losses(RunDir(tmp_path / "whole"))
    files = [folder / "checkpoints" / "step-000020" / "model" / "adapter_model.safetensors" for folder in (tmp_path / "whole", run_dir.path)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_cancel_ends_at_once_without_saving(lab, tmp_path):
    process, attempt, run_id = lab.start(tmp_path, 2, num_epochs=200)
    wait_for(lambda: steps_done(attempt) >= 7 and RunDir(tmp_path).checkpoint_ids(), "the seventh step and a checkpoint")
    write_json(attempt.stop, {"want": "cancel"})
    process.terminate()
    process.wait(timeout=30)
    assert alive(run_id) == []
    assert attempt.errors() == []
    result = read_json(attempt.result)
    assert (result["status"], result["want"]) == ("stopped", "cancel")
    assert 7 <= result["steps"] < 1000
    assert all(RunDir(tmp_path).manifest(name)["trigger"] != "stop" for name in RunDir(tmp_path).checkpoint_ids())


def test_a_stop_file_alone_is_obeyed(lab, tmp_path):
    process, attempt, _ = lab.start(tmp_path, 2, num_epochs=200, save_every_epoch=False)
    wait_for(lambda: steps_done(attempt) >= 1, "the first step")
    write_json(attempt.stop, {"want": "pause"})
    assert process.wait(timeout=60) == 0
    result = read_json(attempt.result)
    assert (result["status"], result["want"]) == ("stopped", "pause")
    assert RunDir(tmp_path).manifest(result["checkpoint"])["trigger"] == "stop"


@pytest.mark.parametrize("when", ["import", "data", "train"])
def test_a_stop_while_starting_ends_in_order(lab, tmp_path, when):
    rows = write_rows(tmp_path / "rows.jsonl", tiny_rows(40_000)) if when == "data" else lab.rows
    process, attempt, run_id = lab.start(tmp_path, 2, data_path=str(rows))
    # Not before both ranks listen for signals: one that dies of SIGTERM earlier is a lost rank, not a stop.
    wait_for(lambda: all(begun(attempt, rank) for rank in (0, 1)) and (when == "import" or phase(attempt) == when), f"phase {when}")
    process.terminate()
    process.wait(timeout=60)
    assert alive(run_id) == []
    assert attempt.errors() == []
    assert read_json(attempt.result)["status"] == "stopped"
    if when != "train":
        assert read_json(attempt.result)["steps"] == 0
        assert RunDir(tmp_path).checkpoint_ids() == []


def begun(attempt, rank):
    log = attempt.rank_log(rank)
    return log.exists() and f"rank {rank} begins" in log.read_text()


def test_a_stop_during_validation_is_obeyed_before_its_end(lab, tmp_path):
    knobs = {"validation_data_path": str(lab.rows), "validation_every_steps": 1, "num_epochs": 100, "max_batch_len": 128}
    process, attempt, _ = lab.start(tmp_path, 1, **knobs)
    wait_for(lambda: phase(attempt) == "validate", "validation")
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    result = read_json(attempt.result)
    assert (result["status"], result["want"]) == ("stopped", "pause")
    assert result["checkpoint"] == RunDir(tmp_path).checkpoint_ids()[-1]
    assert [event["type"] for event in events(RunDir(tmp_path))][-1] == "ended"
