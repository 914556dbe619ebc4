"""What is run by name: `rank ATTEMPT_DIR` (torchrun's target), and the JSON commands that need torch or a tokenizer.

    python -m posttrain_trainer torchrun ...                                   torch.distributed.run, which begins and ends sooner here
    python -m posttrain_trainer rank ATTEMPT_DIR
    python -m posttrain_trainer {inspect,estimate,convert,generate,version}    JSON object on stdin and stdout
    python -m posttrain_trainer train                                          a run with its own torchrun, see `Training`

A rank brings its log, its lock and its answer to signals up before it imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from posttrain_trainer import __version__
from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.errors import InvalidArguments, Lost
from posttrain_trainer.contract.events import RunResult, StopWant
from posttrain_trainer.contract.locks import Lock
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, read_json, write_json
from posttrain_trainer.contract.spec import AttemptArguments
from posttrain_trainer.failures import as_trainer_error, is_peer_gone
from posttrain_trainer.metrics.heartbeat import Heart
from posttrain_trainer.signals import StopRequests
from posttrain_trainer.startup import leave, quick_imports

_TOOLS = ("inspect", "estimate", "convert", "generate")
_CAUSE_WAIT_S = 3.0


def main(argv: list[str]) -> int:
    """Run one command; returns the exit code."""
    if len(argv) == 2 and argv[0] == "rank":
        return Rank(AttemptDir(Path(argv[1]).resolve())).run()
    if argv[:1] == ["torchrun"]:
        return _torchrun(argv[1:])
    if argv == ["train"]:
        return Training().run()
    if len(argv) == 1 and argv[0] in (*_TOOLS, "version"):
        return _tool(argv[0])
    print(__doc__, file=sys.stderr)
    return 2


class Training:
    """`train_torchrun` for a program that waits: one line in, a line when it has begun, a line when it is over.

    In: `{"train_args", "torch_args"?, "stop_at_eof"?}` on one line. Out: `{"attempt": FOLDER}`, then `{"result": ...}` or
    `{"error": ...}`. With stop_at_eof, the end of stdin stops the run as SIGTERM does, with a checkpoint: whoever started
    it is gone.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)

    def run(self) -> int:
        """Train; exit code 0 when the run ended in order, 1 when it failed."""
        # Not at the top: a rank does not need it.
        from posttrain_trainer.launcher import train_torchrun

        try:
            data = self._question()
            if data.pop("stop_at_eof", False):
                threading.Thread(target=_stop_at_eof, daemon=True).start()
            told = AttemptArguments.model_validate({"contract": CONTRACT_VERSION, "torch_args": {}, **data})
            result = train_torchrun(told.torch_args, told.train_args, on_start=lambda attempt: self._say({"attempt": str(attempt.path)}))
            self._say({"result": result.model_dump(mode="json")})
            return 0
        except Exception as error:  # noqa: BLE001  the edge: every failure becomes the contract's error
            self._say({"error": as_trainer_error(error).to_json()})
            return 1

    def _say(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more; the run's own files hold the same
            self._answers.write(json.dumps(answer) + "\n")

    def _question(self) -> dict[str, Any]:
        try:
            data = json.loads(sys.stdin.readline())
        except ValueError as error:
            raise InvalidArguments(f"the first line of stdin holds no JSON: {error}") from error
        if not isinstance(data, dict):
            raise InvalidArguments("the first line of stdin must hold one JSON object")
        return data


def _stop_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class Rank:
    """One rank of one attempt, from its first line to its exit code.

    Args:
        attempt: The attempt's folder, which exists and holds arguments.json.
    """

    def __init__(self, attempt: AttemptDir) -> None:
        self._started = time.perf_counter()
        self.attempt = attempt
        self._ending = False
        self.rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.heart = Heart(attempt.heartbeat if self.rank == 0 else None)
        self.stop = StopRequests(attempt, self.rank, world_size, at_once=self._record_stop, vanished=self._record_vanished)

    def run(self) -> int:
        """Train; exit code 0 when the run ended in order (also when it was stopped), 1 when this rank failed."""
        self._redirect()
        with_lock = Lock(self.attempt.run_lock, shared=True)
        try:
            self.stop.install()
            print(f"[info] rank {self.rank} begins as process {os.getpid()}", flush=True)
            self.heart.beat("import")
            result = self._train()
            self._ending = self.stop.claim_end()
            if self._ending and self.rank == 0:
                write_json(self.attempt.result, result.model_dump(mode="json"))
            return 0
        except BaseException as error:  # noqa: BLE001  the edge: every end of a rank leaves a record
            return self._failed(error)
        finally:
            with_lock.release()

    def _train(self) -> RunResult:
        args = read_arguments(self.attempt).train_args
        # Not at the top: torch and transformers take seconds, and the service waits for the first heartbeat.
        with quick_imports(without=() if args.qat is not None else ("torchao",)):
            from posttrain_trainer.build import run

        return run(self.attempt, args, heart=self.heart, stop=self.stop, import_s=round(time.perf_counter() - self._started, 3))

    def _redirect(self) -> None:
        """Send this process's output, that of C++ code included, to the rank's own log."""
        path = self.attempt.rank_log(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def _failed(self, error: BaseException) -> int:
        mapped = as_trainer_error(error, rank=self.rank)
        mapped.exit_code = 1
        print(f"[error] {mapped.code}: {mapped.message}\n{mapped.details.get('traceback', '')}", file=sys.stderr, flush=True)
        if is_peer_gone(error) and self._other_cause():
            return 1
        if self._ending or self.stop.claim_end():
            write_json(self.attempt.error(self.rank), mapped.to_json())
        else:
            # A stop request was being obeyed when this happened; its thread ends the process.
            time.sleep(_CAUSE_WAIT_S)
        return 1

    def _other_cause(self) -> bool:
        """Whether the broken collective is the consequence of something recorded: another rank's error, or a cancel."""
        deadline = time.monotonic() + _CAUSE_WAIT_S
        while time.monotonic() < deadline:
            if any(rank != self.rank for rank, _ in self.attempt.errors()):
                return True
            time.sleep(0.05)
        return False

    def _record_stop(self, want: StopWant) -> None:
        """Rank 0 ends without waiting: say how far it was by the last heartbeat."""
        now = self.heart.now
        newest = _newest_checkpoint(self.attempt)
        result = RunResult(
            status="stopped",
            want=want,
            steps=now.step,
            total_steps=now.total_steps or 0,
            epochs=now.epoch,
            samples_seen=now.samples_seen,
            tokens_seen=now.tokens_seen,
            checkpoint=newest.name if newest else None,
            checkpoint_path=str(newest) if newest else None,
            train_time_s=0.0,
        )
        write_json(self.attempt.result, result.model_dump(mode="json"))

    def _record_vanished(self, ranks: list[int]) -> None:
        names = ", ".join(str(rank) for rank in ranks)
        error = Lost(f"rank {names} ended without a word while the run was starting (killed, perhaps for lack of memory)", rank=ranks[0])
        write_json(self.attempt.error(self.rank), error.to_json())


def read_arguments(attempt: AttemptDir) -> AttemptArguments:
    """The arguments of an attempt.

    Raises:
        InvalidArguments: They are missing, malformed, or of another contract version.
    """
    data = read_json(attempt.arguments)
    if not isinstance(data, dict):
        raise InvalidArguments(f"{attempt.arguments} is missing or not an object")
    if data.get("contract") != CONTRACT_VERSION:
        raise InvalidArguments(
            f"the arguments are of contract version {data.get('contract')}, this trainer speaks {CONTRACT_VERSION}; "
            "install the same version of posttrain on both sides"
        )
    return AttemptArguments.model_validate(data)


def _newest_checkpoint(attempt: AttemptDir) -> Path | None:
    run_dir = RunDir(attempt.path.parent.parent)
    names = run_dir.checkpoint_ids()
    return run_dir.checkpoint(names[-1]) if names else None


def _torchrun(argv: list[str]) -> int:
    """torchrun, as its own command runs it: what ends it is written to stderr, whatever it is."""
    with quick_imports():
        from torch.distributed.run import main as torchrun
    try:
        torchrun(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  the edge: as the interpreter would
        traceback.print_exc()
        return 1
    return 0


def _tool(command: str) -> int:
    """One JSON command; what libraries print goes to stderr, so that stdout holds the answer alone."""
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        answer, code = _answer(command), 0
    except Exception as error:  # noqa: BLE001  the edge: every failure becomes the contract's error
        answer, code = {"error": as_trainer_error(error).to_json()}, 1
    with answer_to:
        json.dump(answer, answer_to, ensure_ascii=False)
        answer_to.write("\n")
    return code


def _answer(command: str) -> dict[str, Any]:
    if command == "version":
        return {"version": __version__, "contract": CONTRACT_VERSION, "python": sys.version.split()[0], "packages": _packages()}
    text = sys.stdin.read()
    try:
        payload = json.loads(text)
    except ValueError as error:
        raise InvalidArguments(f"stdin holds no JSON: {error}") from error
    if not isinstance(payload, dict):
        raise InvalidArguments("stdin must hold one JSON object")
    # Not at the top: a rank does not need them, and `version` has to answer at once.
    with quick_imports(without=() if _needs_torchao(payload) else ("torchao",)):
        from posttrain_trainer import tools

    result: dict[str, Any] = getattr(tools, command)(payload)
    return result


def _needs_torchao(payload: dict[str, Any]) -> bool:
    args = payload.get("train_args")
    return isinstance(args, dict) and args.get("qat") is not None


def _packages() -> dict[str, str]:
    """Versions of the packages that decide what the trainer can do; those absent are left out."""
    from importlib import metadata

    found = {}
    for name in ("torch", "transformers", "accelerate", "peft", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
