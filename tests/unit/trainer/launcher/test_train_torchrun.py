"""train_torchrun with a made-up interpreter in torchrun's place: what it makes of every kind of end."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain_trainer import FullTrainingArguments, TorchrunArguments, train_torchrun
from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.errors import InvalidData, LaunchFailed, Lost, ModelNotFound, OutOfMemory, TrainerError
from posttrain_trainer.contract.locks import hold
from posttrain_trainer.contract.proc import find
from posttrain_trainer.contract.rundir import ENV_RUN_ID, RunDir, read_json, write_json

RESULT = {
    "status": "completed", "steps": 3, "total_steps": 3, "epochs": 1.0, "samples_seen": 9, "tokens_seen": 90, "train_time_s": 1.0,
}  # fmt: skip


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


class Lab:
    """A run directory, and interpreters that do what a test says instead of running torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = RunDir(folder / "run")

    def python(self, body: str) -> str:
        """An executable that gets torchrun's command line; `attempt` is the attempt's folder."""
        path = self.folder / "python"
        path.write_text(
            f"#!{sys.executable} -IS\nimport json, os, signal, sys, time\nfrom pathlib import Path\nattempt = Path(sys.argv[-1])\n"
            f"def write(name, data): (attempt / name).write_text(json.dumps(data))\n{body}\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def train(self, body: str, **torch_args):
        return train_torchrun(TorchrunArguments(**torch_args), self.args(), python=self.python(body))

    def args(self, **knobs) -> FullTrainingArguments:
        return FullTrainingArguments(model_path="owner/m", data_path=__file__, ckpt_output_dir=str(self.run_dir.path), **knobs)


def test_a_completed_run_returns_its_record(lab):
    result = lab.train(f"write('result.json', {RESULT})", nproc_per_node=2)
    assert (result.status, result.steps) == ("completed", 3)
    arguments = read_json(lab.run_dir.attempt(1).arguments)
    assert arguments["contract"] == CONTRACT_VERSION
    assert arguments["train_args"]["ckpt_output_dir"] == str(lab.run_dir.path)
    assert arguments["torch_args"]["nproc_per_node"] == 2


def test_torchrun_gets_an_argument_list_and_the_marker(lab):
    lab.train(f"write('seen.json', [sys.argv[1:], dict(os.environ)]); write('result.json', {RESULT})", nproc_per_node=2)
    argv, env = read_json(lab.run_dir.attempt(1).path / "seen.json")
    assert argv[:4] == ["-m", "posttrain_trainer", "torchrun", "--nproc-per-node=2"]
    assert argv[-4:] == ["-m", "posttrain_trainer", "rank", str(lab.run_dir.attempt(1).path)]
    assert len(env[ENV_RUN_ID]) == 36
    assert env["POSTTRAIN_ATTEMPT"] == "1"
    assert env["POSTTRAIN_LAUNCHER_LOCK"] == str(lab.run_dir.attempt(1).shim_lock)


def test_each_call_is_the_next_attempt(lab):
    for _ in range(2):
        lab.train(f"write('result.json', {RESULT})")
    (lab.run_dir.path / "attempts" / "9").mkdir()
    lab.train(f"write('result.json', {RESULT})")
    assert [attempt.number for attempt in lab.run_dir.attempts()] == [1, 2, 9, 10]


def test_the_error_of_the_lowest_failing_rank_is_raised_with_its_code_and_class(lab):
    errors = {1: OutOfMemory("no memory", rank=1, exit_code=1), 2: InvalidData("bad", rank=2)}
    body = "".join(f"write('error-rank-{rank}.json', json.loads({json.dumps(json.dumps(error.to_json()))}))\n" for rank, error in errors.items())
    with pytest.raises(OutOfMemory) as caught:
        lab.train(body + "sys.exit(1)")
    assert (caught.value.message, caught.value.rank, caught.value.exit_code) == ("no memory", 1, 1)


def test_a_failed_torchrun_is_no_success_without_the_record_of_one(lab):
    with pytest.raises(TrainerError) as caught:
        lab.train("write('heartbeat.json', {'phase': 'train'}); sys.exit(3)")
    assert caught.value.exit_code == 3


def test_what_goes_wrong_after_a_complete_run_takes_nothing_away(lab):
    error = json.dumps(Lost("connection closed by peer", rank=1).to_json())
    result = lab.train(f"write('result.json', {RESULT}); write('error-rank-1.json', json.loads({error!r})); sys.exit(3)")
    assert (result.status, result.steps) == ("completed", 3)
    assert result.warnings == ["after training was complete and saved, torchrun ended with exit code 3 (rank 1: connection closed by peer)"]
    assert "see " in lab.train(f"write('result.json', {RESULT}); sys.exit(-9)").warnings[0]


def test_a_stop_in_the_last_step_is_a_complete_run(lab):
    body = (
        f"def stop(*_):\n    write('result.json', {RESULT})\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, stop)\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    result = lab.train(body)
    assert (result.status, result.warnings) == ("completed", [])


def test_a_stopped_run_is_in_order_although_torchrun_says_1(lab):
    result = lab.train(f"write('result.json', {RESULT | {'status': 'stopped', 'want': 'pause'}}); sys.exit(1)")
    assert (result.status, result.want) == ("stopped", "pause")


def test_silence_is_a_failure(lab):
    with pytest.raises(LaunchFailed, match="no rank recorded a result") as caught:
        lab.train("pass")
    assert caught.value.exit_code == 0


def test_a_script_error_is_told_with_its_last_line(lab):
    with pytest.raises(LaunchFailed, match=r"exit code 2.*port is taken") as caught:
        lab.train("print('the port is taken', file=sys.stderr); sys.exit(2)")
    assert caught.value.exit_code == 2
    assert "the port is taken" in caught.value.details["log_tail"]
    assert "the port is taken" in lab.run_dir.attempt(1).torchrun_log.read_text()


def test_a_python_without_torch_is_named(lab):
    said = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'"
    with pytest.raises(LaunchFailed, match=r"no torch.*posttrain\[train\]"):
        lab.train(f"print({said!r}, file=sys.stderr); sys.exit(1)")


def test_an_interpreter_that_is_not_there_is_named(lab):
    with pytest.raises(LaunchFailed, match="/nowhere/python could not be started"):
        train_torchrun(TorchrunArguments(), lab.args(), python="/nowhere/python")


def test_a_rank_that_was_killed_is_told_by_its_signal(lab):
    said = "Root Cause (first observed failure):\n[0]:\n  time      : now\n  host      : here\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)"
    with pytest.raises(Lost, match="rank 1 was killed by SIGKILL") as caught:
        lab.train(f"print({said!r}); sys.exit(1)")
    assert (caught.value.rank, caught.value.exit_code) == (1, -9)


def test_a_folder_in_use_is_refused(lab):
    attempt = lab.run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    with hold(attempt.run_lock, shared=True), pytest.raises(LaunchFailed, match="attempt 1 is still running"):
        lab.train("pass")
    assert len(lab.run_dir.attempts()) == 1


def test_what_torchrun_leaves_behind_is_killed(lab):
    body = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nwrite('env.json', dict(os.environ))\n"
    lab.train(body + f"write('result.json', {RESULT})")
    run_id = read_json(lab.run_dir.attempt(1).path / "env.json")[ENV_RUN_ID]
    assert find(run_id) == []


def test_sigterm_asks_for_a_pause_and_returns_the_record(lab):
    body = (
        "def stop(*_):\n"
        "    want = json.loads((attempt / 'stop.json').read_text())['want']\n"
        f"    write('result.json', {RESULT} | {{'status': 'stopped', 'want': want}})\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)"
    )
    result = lab.train(body)
    assert (result.status, result.want) == ("stopped", "pause")


def test_ctrl_c_ends_the_run_and_is_passed_on(lab):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        lab.train(body)
    assert read_json(lab.run_dir.attempt(1).stop) == {"want": "pause"}


def test_stopped_before_any_rank_was_up_is_no_failure(lab):
    write_json_of_checkpoint(lab.run_dir)
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    result = lab.train(body)
    assert (result.status, result.want, result.steps, result.checkpoint) == ("stopped", "pause", 7, "step-000007")


def write_json_of_checkpoint(run_dir: RunDir) -> None:
    folder = run_dir.checkpoint("step-000007")
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", {"step": 7, "epoch": 0.5, "samples_seen": 70, "tokens_seen": 700})


def test_a_model_that_can_be_nowhere_starts_nothing(lab):
    for path in ("nope", "../nope", str(lab.folder / "nope")):
        with pytest.raises(ModelNotFound, match=r"there is no folder /.*nope"):
            train_torchrun(TorchrunArguments(), lab.args().model_copy(update={"model_path": path}), python=lab.python("write('result.json', {})"))
    assert not lab.run_dir.path.exists()


@pytest.mark.parametrize("name", ["data_path", "validation_data_path"])
def test_rows_that_are_not_there_start_nothing(lab, name):
    args = lab.args().model_copy(update={name: "nope.jsonl"})
    with pytest.raises(InvalidData, match=rf"^{name}: there is no file /.*/nope\.jsonl"):
        train_torchrun(TorchrunArguments(), args, python=lab.python("write('result.json', {})"))
    assert not lab.run_dir.path.exists()


def test_another_node_joins_the_attempt_of_node_0(lab):
    two = {"nnodes": 2, "rdzv_endpoint": "127.0.0.1:1", "rdzv_id": "r"}
    first = lab.python(f"write('result.json', {RESULT})")
    train_torchrun(TorchrunArguments(node_rank=0, **two), lab.args(), python=first)
    attempt = lab.run_dir.attempt(1)
    attempt.result.unlink()  # as it is while node 0 trains
    second = lab.python(f"write('argv.json', sys.argv); write('result.json', {RESULT})")
    result = train_torchrun(TorchrunArguments(node_rank=1, **two), lab.args(), python=second)
    assert result.status == "completed"
    assert "--node-rank=1" in read_json(attempt.path / "argv.json")
    assert [one.number for one in lab.run_dir.attempts()] == [1]


def test_a_node_without_node_0_gives_up_by_name(lab, monkeypatch):
    from posttrain_trainer import launcher

    monkeypatch.setattr(launcher, "_JOIN_WAIT_S", 0.3)
    with pytest.raises(LaunchFailed, match="node 1 found no attempt of node 0"):
        train_torchrun(TorchrunArguments(nnodes=2, node_rank=1, rdzv_endpoint="127.0.0.1:1"), lab.args(), python="unused")


def test_calling_it_loads_no_torch():
    code = "import sys; from posttrain_trainer import train_torchrun, FullTrainingArguments, TorchrunArguments; print('torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert answer.stdout.strip() == "False"
