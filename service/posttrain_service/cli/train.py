"""`posttrain train`: a run without the service. The trainer's own interpreter does it; this process only watches."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Any

import typer

from posttrain_service.cli.common import JsonOption, fail, sentences, show_json
from posttrain_service.cli.flags import given_flags, with_flags
from posttrain_service.cli.profile import Resolved, as_profile, read_profile, resolve
from posttrain_service.cli.train_screen import Screen
from posttrain_service.errors import InvalidRequest

_LOOK_S = 0.5
_STOPPED = 130
"""Exit code of a run that was stopped before its end."""

Answers = queue.Queue[dict[str, Any] | None]


@with_flags
def train(
    *,
    train_profile: Annotated[
        Path | None, typer.Option("--train-profile", help="YAML with train_args and torch_args.", exists=True, dir_okay=False)
    ] = None,
    print_resolved: Annotated[bool, typer.Option("--print-resolved", help="Print every value and where it is from; train nothing.")] = False,
    trainer_python: Annotated[
        str, typer.Option("--trainer-python", envvar="POSTTRAIN_TRAINER_PYTHON", help="Interpreter that has torch and the trainer.")
    ] = sys.executable,
    as_json: JsonOption = False,
    **flags: Any,
) -> None:
    """Train without a service. Each flag is an argument of the run; flags win over the profile, the profile over the defaults.

    Ctrl-C writes a checkpoint and ends; the same command goes on from there. On several nodes, run it on each, with its own
    --node-rank, the same --rdzv-endpoint, and --ckpt-output-dir on a file system that they share.
    """
    with sentences():
        resolved = _resolve(train_profile, flags)
        if print_resolved:
            print(as_profile(resolved), end="")
            return
        answer = run(trainer_python, resolved, Screen())
    if "error" in answer:
        error = answer["error"]
        listed = (error.get("details") or {}).get("errors")
        where = f" (its logs: {answer['attempt']}/logs)" if answer.get("attempt") else ""
        fail(f"{error.get('message')}{where}", listed if isinstance(listed, list) else ())
    result = answer["result"]
    if as_json:
        show_json(result)
    else:
        print(_summary(result))
    if result["status"] == "stopped":
        raise typer.Exit(_STOPPED)


def run(python: str, resolved: Resolved, screen: Screen) -> dict[str, Any]:
    """Start the trainer, show its progress, wait for the end; `{"result"}` or `{"error"}`, with the attempt's folder.

    SIGINT and SIGTERM stop the run with a checkpoint; a second one ends it at once.

    Raises:
        OSError: The interpreter could not be started.
    """
    question = {
        "train_args": resolved.train_args.model_dump(mode="json"), "torch_args": resolved.torch_args.model_dump(mode="json"),
        "stop_at_eof": True,
    }  # fmt: skip
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # `python -m` would import from the working directory first
    process = subprocess.Popen(
        [python, "-m", "posttrain_trainer", "train"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    answers: Answers = queue.Queue()
    words: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(process.stdout, answers), daemon=True),
        threading.Thread(target=words.extend, args=(process.stderr,), daemon=True),
    ]
    for reader in readers:
        reader.start()
    with screen, _passed_on(process):
        with contextlib.suppress(BrokenPipeError):  # it has ended already; what it said is told below
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()  # and left open: its end tells the trainer that nobody waits any more
        answer = _watch(answers, screen)
    process.wait()
    for reader in readers:
        reader.join()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    if "result" in answer or "error" in answer:
        return answer
    last = words[-1].strip() if words else f"exit code {process.returncode}"
    return answer | {"error": {"message": f"the trainer ended without a result: {last}"}}


def _watch(answers: Answers, screen: Screen) -> dict[str, Any]:
    """All that the trainer says, put together; the screen is drawn while it is silent."""
    told: dict[str, Any] = {}
    while True:
        try:
            said = answers.get(timeout=_LOOK_S)
        except queue.Empty:
            screen.look()
            continue
        if said is None:
            screen.look()
            return told
        told |= said
        if "attempt" in said:
            screen.begin(Path(said["attempt"]))


def _read(stream: IO[str], answers: Answers) -> None:
    for line in stream:
        try:
            said = json.loads(line)
        except ValueError:
            continue  # a library's words
        if isinstance(said, dict):
            answers.put(said)
    answers.put(None)


@contextmanager
def _passed_on(process: subprocess.Popen[str]) -> Iterator[None]:
    """Within the block, signals that would end this process stop the run instead."""
    asked = 0

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            process.terminate()
        else:
            process.kill()  # its ranks notice that their launcher is gone, and end

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resolve(profile: Path | None, flags: dict[str, Any]) -> Resolved:
    try:
        given = given_flags(flags)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return resolve(read_profile(profile) if profile is not None else {}, given)


def _summary(result: dict[str, Any]) -> str:
    loss = "" if result["loss"] is None else f", last loss {result['loss']:.4f}"
    done = f"{result['status']} after step {result['steps']} of {result['total_steps']}{loss}"
    return f"{done}\n{result['checkpoint_path']}/model" if result["checkpoint_path"] else done
