"""Real training runs of a tiny model, started by torchrun as in production, on one and two gloo ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.command import torchrun_argv
from posttrain_trainer.contract.events import RunResult
from posttrain_trainer.contract.proc import find, kill_marked
from posttrain_trainer.contract.rundir import ENV_ATTEMPT, ENV_RUN_ID, AttemptDir, RunDir, read_json, write_json
from posttrain_trainer.contract.spec import AttemptArguments, FullTrainingArguments, TorchrunArguments
from posttrain_trainer.launcher import train_torchrun
from posttrain_trainer.testing import tiny_model, tiny_rows, write_rows

NUM_ROWS = 40
BATCH = 8
STEPS_PER_EPOCH = NUM_ROWS // BATCH


@dataclass
class Lab:
    """A tiny model, its data, and ways to train on them."""

    folder: Path
    started: list[tuple[subprocess.Popen[bytes], str]] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def args(self, out: Path, **knobs: Any) -> FullTrainingArguments:
        """Deterministic fp32 arguments; two epochs of five steps."""
        base = {
            "model_path": str(self.model), "data_path": str(self.rows), "ckpt_output_dir": str(out), "dtype": "fp32",
            "device": "cpu", "deterministic": True, "num_epochs": 2, "effective_batch_size": BATCH, "max_seq_len": 128,
            "max_batch_len": 256, "learning_rate": 1e-3, "keep_last": 5,
        }  # fmt: skip
        return FullTrainingArguments(**{**base, **knobs})

    def train(self, out: Path, ranks: int = 1, **knobs: Any) -> RunResult:
        return train_torchrun(TorchrunArguments(nproc_per_node=ranks, shutdown_timeout_s=20), self.args(out, **knobs))

    def start(self, out: Path, ranks: int = 1, **knobs: Any) -> tuple[subprocess.Popen[bytes], AttemptDir, str]:
        """torchrun alone, without the launcher, as the service's shim starts it: (process, attempt, run id)."""
        attempt = RunDir(out).attempt(1)
        attempt.logs.mkdir(parents=True)
        torch_args = TorchrunArguments(nproc_per_node=ranks, shutdown_timeout_s=20)
        arguments = AttemptArguments(contract=CONTRACT_VERSION, train_args=self.args(out, **knobs), torch_args=torch_args)
        write_json(attempt.arguments, arguments.model_dump(mode="json"))
        run_id = str(uuid.uuid4())
        env = os.environ | {ENV_RUN_ID: run_id, ENV_ATTEMPT: "1"}
        with attempt.torchrun_log.open("ab") as log:
            argv = torchrun_argv(sys.executable, torch_args, attempt.path)
            process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.started.append((process, run_id))
        return process, attempt, run_id

    def launcher(self, out: Path, ranks: int = 1, **knobs: Any) -> subprocess.Popen[bytes]:
        """A process of its own that calls train_torchrun and prints the result."""
        arguments = self.args(out, **knobs).model_dump_json()
        code = (
            "import sys; from posttrain_trainer import train_torchrun, FullTrainingArguments, TorchrunArguments\n"
            f"args = FullTrainingArguments.model_validate_json({arguments!r})\n"
            f"print(train_torchrun(TorchrunArguments(nproc_per_node={ranks}, shutdown_timeout_s=20), args).model_dump_json())"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.started.append((process, ""))
        return process

    def clean_up(self) -> None:
        for process, run_id in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
            if run_id:
                kill_marked(run_id)


@pytest.fixture(scope="session")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", tiny_rows(NUM_ROWS))
    return folder


@pytest.fixture
def lab(materials: Path) -> Iterator[Lab]:
    lab = Lab(materials)
    yield lab
    lab.clean_up()


@pytest.fixture(scope="session")
def unbroken(materials: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RunDir]:
    """Run directories of finished deterministic runs by number of ranks, trained once; copy before changing them."""
    done: dict[int, RunDir] = {}

    def get(ranks: int) -> RunDir:
        if ranks not in done:
            out = tmp_path_factory.mktemp(f"unbroken-{ranks}")
            assert Lab(materials).train(out, ranks).status == "completed"
            done[ranks] = RunDir(out)
        return done[ranks]

    return get


def copy_run(source: RunDir, target: Path, *, drop: tuple[str, ...] = ()) -> RunDir:
    """A copy to change, without some checkpoints."""
    shutil.copytree(source.path, target)
    for name in drop:
        shutil.rmtree(target / "checkpoints" / name)
    return RunDir(target)


def losses(run_dir: RunDir, attempt: int = 1) -> dict[int, float]:
    return {point["step"]: point["loss"] for point in points(run_dir, attempt) if "loss" in point}


def points(run_dir: RunDir, attempt: int = 1) -> list[dict[str, Any]]:
    return lines(run_dir.attempt(attempt).metrics)


def events(run_dir: RunDir, attempt: int = 1) -> list[dict[str, Any]]:
    return lines(run_dir.attempt(attempt).events)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 240.0) -> None:
    """Look again and again until the condition holds: other processes can only be looked at."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.02)


def steps_done(attempt: AttemptDir) -> int:
    return attempt.metrics.read_text().count("\n") if attempt.metrics.exists() else 0


def phase(attempt: AttemptDir) -> str | None:
    beat = read_json(attempt.heartbeat)
    return beat and beat["phase"]


def alive(run_id: str) -> list[Any]:
    return find(run_id)
