"""The commands by name: answers and errors as JSON on stdout, and what a rank makes of its arguments."""

import json
import subprocess
import sys

import pytest

from posttrain_trainer import __version__
from posttrain_trainer.__main__ import main, read_arguments
from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.rundir import RunDir, read_json, write_json


def command(*argv: str, stdin: str = "") -> tuple[int, dict]:
    done = subprocess.run([sys.executable, "-m", "posttrain_trainer", *argv], input=stdin, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


def test_version_tells_the_contract():
    code, answer = command("version")
    assert (code, answer["version"], answer["contract"]) == (0, __version__, CONTRACT_VERSION)
    assert answer["packages"]["torch"]


@pytest.mark.parametrize(("stdin", "says"), [("{", "no JSON"), ("[1]", "one JSON object")])
def test_a_request_that_is_no_object_is_answered_as_an_error(stdin, says):
    code, answer = command("inspect", stdin=stdin)
    assert code == 1
    assert answer["error"]["code"] == "invalid_arguments"
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("argv", [[], ["dance"], ["rank"], ["version", "more"]])
def test_an_unknown_command_is_no_success(argv, capsys):
    assert main(argv) == 2
    assert "posttrain_trainer rank ATTEMPT_DIR" in capsys.readouterr().err


def attempt_with(tmp_path, data):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    if data is not None:
        write_json(attempt.arguments, data)
    return attempt


def arguments(**changes):
    return {
        "contract": CONTRACT_VERSION,
        "train_args": {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"},
        "torch_args": {},
    } | changes


def test_arguments_are_read(tmp_path):
    assert read_arguments(attempt_with(tmp_path, arguments())).train_args.model_path == "m"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "missing"),
        (arguments(contract=CONTRACT_VERSION + 1), "contract version"),
        (arguments(contract=CONTRACT_VERSION + 1, new_field=1), "contract version"),
    ],
)
def test_arguments_of_another_version_are_refused_by_name(tmp_path, data, says):
    with pytest.raises(InvalidArguments, match=says):
        read_arguments(attempt_with(tmp_path, data))


def test_a_rank_that_fails_before_it_starts_leaves_its_error_and_its_log(tmp_path):
    attempt = attempt_with(tmp_path, arguments(train_args={"model_path": "m"}))
    done = subprocess.run([sys.executable, "-m", "posttrain_trainer", "rank", str(attempt.path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", "")
    error = read_json(attempt.error(0))
    assert (error["code"], error["rank"], error["exit_code"]) == ("invalid_arguments", 0, 1)
    assert "data_path" in error["message"]
    assert "data_path" in attempt.rank_log(0).read_text()
    assert read_json(attempt.result) is None
    assert read_json(attempt.heartbeat)["phase"] == "import"


def test_train_answers_with_lines_and_stops_when_nobody_waits(tmp_path):
    def ask(line: str) -> tuple[int, list[dict]]:
        done = subprocess.run([sys.executable, "-m", "posttrain_trainer", "train"], input=line + "\n", capture_output=True, text=True, timeout=200)
        return done.returncode, [json.loads(answer) for answer in done.stdout.splitlines()]

    for line, said in (("nonsense", "no JSON"), ("[]", "one JSON object"), ('{"train_args": {}}', "model_path")):
        code, [answer] = ask(line)
        assert code == 1
        assert said in answer["error"]["message"]
    arguments = {"model_path": "owner/m", "data_path": __file__, "ckpt_output_dir": str(tmp_path)}
    code, answers = ask(json.dumps({"train_args": arguments, "stop_at_eof": True}))
    # The end of stdin is there at once: the run ends before it does anything, by its own record or by the signal.
    assert code == 0 or code == -15
    assert "error" not in (answers[-1] if answers else {})
    assert list(tmp_path.rglob("checkpoints")) == []
