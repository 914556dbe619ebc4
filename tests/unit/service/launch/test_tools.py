from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.errors import DiskFull, InvalidRequest, NotFound, ServiceError, Unavailable
from posttrain_service.launch.tools import run_tool
from posttrain_trainer.contract import proc
from posttrain_trainer.contract.errors import DiskFull as TrainerDiskFull
from posttrain_trainer.contract.errors import InvalidArguments, InvalidData, ModelNotFound, OutOfMemory, TrainerError


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """Makes an interpreter whose `-m posttrain_trainer COMMAND` is the given code."""

    def make(code: str) -> Path:
        body = tmp_path / "body.py"
        body.write_text("import json, os, sys\n" + code)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{body}" "$@"\n')
        python.chmod(0o755)
        return python

    return make


def test_json_goes_in_and_comes_out(trainer: Any) -> None:
    python = trainer("print(json.dumps({'argv': sys.argv[1:], 'in': json.load(sys.stdin), 'env': dict(os.environ)}))")
    environ = {"PATH": "/bin", "HF_TOKEN": "t", "LD_PRELOAD": "", "PYTHONPATH": "/evil"}
    answer = run_tool(python, "inspect", {"rows": ["ü", "漢"]}, 60, environ=environ)
    assert answer["argv"] == ["-m", "posttrain_trainer", "inspect"]
    assert answer["in"] == {"rows": ["ü", "漢"]}
    assert answer["env"]["HF_TOKEN"] == "t"
    assert not {"LD_PRELOAD", "PYTHONPATH", "HF_HUB_OFFLINE"} & set(answer["env"])
    for payload in ({"model_path": "/m"}, {"train_args": {"model_path": "/m"}}):
        assert run_tool(python, "estimate", payload, 60)["env"]["HF_HUB_OFFLINE"] == "1"


def test_what_a_library_prints_does_not_spoil_the_answer(trainer: Any) -> None:
    code = "print('Loading weights: 100%'); sys.stderr.write('x' * 3_000_000); print(json.dumps({'ok': True})); print()"
    assert run_tool(trainer(code), "generate", {}, 60) == {"ok": True}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidArguments("lr is too high"), InvalidRequest),
        (InvalidData("2 bad rows", details={"errors": [{"line": 3, "message": "no messages"}, "odd"]}), InvalidRequest),
        (ModelNotFound("no such model"), NotFound),
        (TrainerDiskFull("no space"), DiskFull),
        (OutOfMemory("too big"), Unavailable),
        (TrainerError("odd"), Unavailable),
    ],
)
def test_the_trainers_own_error_is_passed_on(trainer: Any, error: TrainerError, expected: type[ServiceError]) -> None:
    code = f"print({json.dumps({'error': error.to_json()})!r}); sys.exit(1)"
    with pytest.raises(ServiceError) as caught:
        run_tool(trainer(code), "inspect", {}, 60)
    assert type(caught.value) is expected
    assert (caught.value.message, caught.value.code) == (error.message, error.code)
    assert caught.value.errors == error.details.get("errors", [])[:1]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit(3)", "inspect ended with exit code 3 and no answer: it printed nothing"),
        ("sys.exit('first\\nno torch here')", "exit code 1 and no answer: no torch here"),
        ("os.kill(os.getpid(), 9)", "ended with signal 9"),
        ("print('hello')", "ended with exit code 0 and no answer"),
        ("print('[1]')", "ended with exit code 0 and no answer"),
        ("print(json.dumps({'rows': 1})); sys.exit(2)", "ended with exit code 2"),
    ],
)
def test_no_answer_is_an_error(trainer: Any, code: str, message: str) -> None:
    with pytest.raises(Unavailable) as caught:
        run_tool(trainer(code), "inspect", {}, 60)
    assert message in caught.value.message


def test_a_missing_interpreter_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="POSTTRAIN_TRAINER_PYTHON"):
        run_tool(tmp_path / "gone", "version", {}, 60)


def test_nothing_outlives_the_time_limit(trainer: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import signal, subprocess, time\nsignal.signal(15, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(600)"
    )
    with pytest.raises(Unavailable, match="took longer than 3 s"):
        run_tool(trainer(code), "estimate", {}, 3.0)
    assert [proc.identify(int(pid)) for pid in pids.read_text().split()] == [None, None]


def test_a_payload_that_is_no_json_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_tool(tmp_path / "gone", "version", {"lr": float("nan")}, 60)
