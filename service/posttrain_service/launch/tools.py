"""Asking the trainer's own interpreter what needs torch or a tokenizer: JSON in, JSON out, a time limit.

The answer is what the command prints on standard output; its other output goes to a file that is quoted only when it
fails. Nothing that a command starts outlives the call.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from posttrain_service.errors import DiskFull, InvalidRequest, NotFound, ServiceError, Unavailable
from posttrain_service.launch.plan import OFFLINE, job_environment
from posttrain_trainer.contract import proc

_ERRORS: dict[str, type[ServiceError]] = {
    "invalid_arguments": InvalidRequest,
    "invalid_data": InvalidRequest,
    "model_not_found": NotFound,
    "disk_full": DiskFull,
}
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_QUOTED_BYTES = 2000


def run_tool(
    trainer_python: Path,
    command: str,
    payload: Mapping[str, Any],
    timeout_s: float,
    *,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The answer of `python -m posttrain_trainer COMMAND` to `payload`.

    Args:
        trainer_python: The interpreter that has torch and the trainer.
        command: inspect, estimate, convert, generate or version.
        payload: JSON-serialisable.
        timeout_s: Seconds after which it is killed, with all that it started.
        environ: The server's environment; the command gets the same part of it as a job.

    Raises:
        InvalidRequest: The trainer refused the arguments or the data; `errors` lists the bad rows.
        NotFound: The model that was named isn't there.
        DiskFull: There was no space to write to.
        Unavailable: The trainer couldn't be started, took too long, failed in another way (the message and the code
            are its own), or ended without an answer.
    """
    run_id = str(uuid.uuid4())
    env = job_environment(environ, run_id=run_id, attempt=1)
    if _names_local_model(payload):
        env |= OFFLINE
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as other:
        question.write(json.dumps(payload, allow_nan=False).encode())
        question.seek(0)
        try:
            process = subprocess.Popen(
                [str(trainer_python), "-m", "posttrain_trainer", command], env=env, cwd=tempfile.gettempdir(),
                stdin=question, stdout=answer, stderr=other, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(
                f"the trainer's Python {trainer_python} could not be started ({error.strerror}); set POSTTRAIN_TRAINER_PYTHON"
            ) from error
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"the trainer's {command} took longer than {timeout_s:g} s and was ended") from None
        finally:
            proc.kill_marked(run_id)
            process.wait()
        return _answer(command, code, answer, other)


def _names_local_model(payload: Mapping[str, Any]) -> bool:
    arguments = payload.get("train_args")
    paths = [payload.get("model_path"), arguments.get("model_path") if isinstance(arguments, Mapping) else None]
    return any(isinstance(path, str) and Path(path).is_absolute() for path in paths)


def _answer(command: str, code: int, answer: IO[bytes], other: IO[bytes]) -> dict[str, Any]:
    answer.seek(0)
    text = answer.read(_MAX_ANSWER_BYTES + 1)
    if len(text) > _MAX_ANSWER_BYTES:
        raise Unavailable(f"the trainer's {command} answered with more than {_MAX_ANSWER_BYTES} bytes")
    data = _object(text)
    if isinstance(data, dict) and isinstance(data.get("error"), dict):
        raise _error(data["error"])
    if code == 0 and isinstance(data, dict):
        return data
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    raise Unavailable(f"the trainer's {command} ended with {how} and no answer: {_last_words(other)}")


def _object(text: bytes) -> object:
    """The JSON object in the output: all of it, or its last line where a library has printed something before."""
    lines = [line for line in text.splitlines() if line.strip()]
    for candidate in (text, lines[-1] if lines else b""):
        try:
            return json.loads(candidate)
        except ValueError:
            continue
    return None


def _error(error: dict[str, Any]) -> ServiceError:
    code = str(error.get("code", "trainer_error"))
    details = error.get("details")
    errors = details.get("errors") if isinstance(details, dict) else None
    listed = [entry for entry in errors if isinstance(entry, dict)] if isinstance(errors, list) else []
    message = str(error.get("message", "the trainer gave no message"))
    return _ERRORS.get(code, Unavailable)(message, code=code, errors=listed)


def _last_words(other: IO[bytes]) -> str:
    size = other.seek(0, os.SEEK_END)
    other.seek(max(0, size - _QUOTED_BYTES))
    lines = other.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
