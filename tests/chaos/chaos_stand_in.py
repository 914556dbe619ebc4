"""A trainer without torch that keeps the contract: stands in for torchrun and its ranks, and waits where a fault shall strike.

As torchrun it starts each rank in a session of its own, passes SIGTERM on, and ends the others when one fails. A rank
holds run.lock, beats through its phases, writes metrics, saves checkpoints with a manifest, obeys stop.json with SIGTERM,
and ends itself when its launcher's lock is free. What a job does is said by its first row, e.g. "hold=save ranks=2":
it stays in that phase, with its heart beating, until the run's folder has a file `go`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from posttrain_trainer.contract.locks import Lock, is_held
from posttrain_trainer.contract.proc import kill_marked
from posttrain_trainer.contract.rundir import (
    ENV_ATTEMPT,
    ENV_LAUNCHER_LOCK,
    ENV_RUN_ID,
    AttemptDir,
    RunDir,
    checkpoint_id,
    read_json,
    write_json,
)

STEPS = 4
SAVES = (2, 4)
TICK_S = 0.01


class Launcher:
    """torchrun."""

    def __init__(self, argv: list[str]) -> None:
        self.num_ranks = next(int(a.split("=")[1]) for a in argv if a.startswith("--nproc-per-node="))
        self.attempt = argv[-1]
        self.stopped = False
        self.ranks: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_term)
        with (RunDir(Path(self.attempt).parent.parent).path / "starts").open("a") as file:
            file.write(f"{Path(self.attempt).name}\n")
        for rank in range(self.num_ranks):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(self.num_ranks)}
            argv = [sys.executable, __file__, "rank", self.attempt]
            self.ranks.append(subprocess.Popen(argv, env=env, start_new_session=True))
        failed = False
        while any(rank.poll() is None for rank in self.ranks):
            if not failed and any(rank.poll() for rank in self.ranks):
                failed = True
                self._say_who_failed()
                self._tell()
                deadline = time.monotonic() + 2
            if failed and time.monotonic() > deadline:
                self._tell(signal.SIGKILL)
            time.sleep(TICK_S)
        if not failed and any(rank.returncode for rank in self.ranks):
            self._say_who_failed()
        return 1 if failed or self.stopped or any(rank.returncode for rank in self.ranks) else 0

    def _say_who_failed(self) -> None:
        rank, code = next((rank, process.returncode) for rank, process in enumerate(self.ranks) if process.poll())
        print(f"Root Cause (first observed failure):\n[0]:\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 0)", flush=True)

    def _on_term(self, _number: int, _frame: object) -> None:
        self.stopped = True
        self._tell()

    def _tell(self, number: int = signal.SIGTERM) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)


class Rank:
    """One rank."""

    def __init__(self, folder: str) -> None:
        self.attempt = AttemptDir(Path(folder))
        self.run_dir = RunDir(self.attempt.path.parent.parent)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        args = read_json(self.attempt.arguments)["train_args"]
        row = json.loads(Path(args["data_path"]).read_text().splitlines()[0])
        words = row["messages"][0]["content"].split()
        self.todo = dict(word.partition("=")[::2] for word in words)
        self.step = self.done = self.ticks = 0
        self.stopped = False
        self.seen: dict[int, tuple[int, int]] = {}
        self.launcher_seen_at = time.monotonic()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in self.todo else self._on_term)
        lock = Lock(self.attempt.run_lock, shared=True)
        for other in self.run_dir.attempts():
            if other.number != self.attempt.number and is_held(other.run_lock):
                (self.run_dir.path / "overlap").touch()
        self.phase("import")
        self.phase("load")
        self.phase("data")
        self.step = self.done = self._resumed()
        while self.step < STEPS:
            self.step += 1
            self.phase("train", hold=self.step == 2)
            self._meet("train")
            self._point()
            self.done = self.step
            if self.step in SAVES:
                self._save()
        self.phase("train", hold_name="end")
        self.step += 1
        self._meet("train")
        if self.rank == 0:
            self.step = STEPS  # the others stay beyond it: rank 0 may not have seen yet that they met
            self._result("completed")
        if self.todo.get("hold") == "ended":
            self._wait()
        lock.release()
        return 0

    def phase(self, name: str, *, hold: bool = True, hold_name: str = "") -> None:
        """Be in a phase for a moment, or until told to go on."""
        self._tick(name)
        if hold and self.todo.get("hold") == (hold_name or name):
            self._wait(name)

    def _wait(self, name: str = "") -> None:
        while not (self.run_dir.path / "go").exists():
            self._tick(name)

    def _tick(self, phase: str) -> None:
        """Progress of this rank; rank 0 makes none while another one makes none, as in a collective."""
        self.ticks += 1
        if self.rank != 0:
            write_json(self.attempt.path / f"tick-{self.rank}", [self.step, self.ticks], durable=False)
        elif phase and self._others_go_on():
            beat = {"time": time.time(), "phase": phase, "step": self.step, "total_steps": STEPS, "epoch": self.step / STEPS}
            write_json(self.attempt.heartbeat, beat, durable=False)
        time.sleep(TICK_S)
        # A rank that is signalled alone has the others stop with it, at the next step that they all make.
        self.stopped = self.stopped or next(self.attempt.path.glob(".signalled-rank-*"), None) is not None
        if phase and self.stopped:
            self._end_early(phase)
        if time.monotonic() - self.launcher_seen_at > 1.0:
            self.launcher_seen_at = time.monotonic()
            if not is_held(Path(os.environ.get(ENV_LAUNCHER_LOCK, self.attempt.shim_lock)), alone=True):
                kill_marked(os.environ[ENV_RUN_ID], int(os.environ[ENV_ATTEMPT]))
                os.kill(os.getpid(), signal.SIGKILL)

    def _others(self) -> dict[int, tuple[int, int]]:
        """Step and ticks of the other ranks."""
        ticks = {rank: read_json(self.attempt.path / f"tick-{rank}") or (0, 0) for rank in range(1, self.world_size)}
        return {rank: (step, count) for rank, (step, count) in ticks.items()}

    def _others_go_on(self) -> bool:
        now = self._others()
        if any(self.seen.get(rank) == tick and tick[0] <= STEPS for rank, tick in now.items()):
            return False
        self.seen = now
        return True

    def _meet(self, phase: str) -> None:
        """Wait for all ranks, as the gradients' reduction does."""
        if self.rank != 0:
            self._tick(phase)
            return
        while any(step < self.step for step, _ in self._others().values()):
            self._tick(phase)

    def _end_early(self, phase: str) -> None:
        want = (read_json(self.attempt.stop) or {}).get("want")
        if phase == "save" and want != "cancel":
            return  # a save is finished first, or the checkpoint would be lost
        (self.attempt.path / f".signalled-rank-{self.rank}").touch()
        if want is None and (self.attempt.errors() or self._is_missing_ranks()):
            os._exit(1)
        if self.rank == 0:
            self.step = self.done  # one that has only begun is done again
            if want != "cancel" and self.step and checkpoint_id(self.step) not in self.run_dir.checkpoint_ids():
                self._checkpoint()
            self._result("stopped", want=want or "pause", steps=self.step)
        os._exit(0)

    def _is_missing_ranks(self) -> bool:
        """Whether the signal means that another rank has died; rank 0 then says so."""
        deadline = time.monotonic() + 1.0
        while self.rank == 0 and time.monotonic() < deadline:
            if all((self.attempt.path / f".signalled-rank-{rank}").exists() for rank in range(self.world_size)):
                return False
            time.sleep(TICK_S)
        if self.rank == 0 and self.world_size > 1:
            error = {"code": "lost", "message": "a rank vanished", "rank": 1, "exit_code": 1, "details": {}, "retryable": True}
            write_json(self.attempt.error(0), error)
        return self.rank == 0 and self.world_size > 1

    def _on_term(self, _number: int, _frame: object) -> None:
        self.stopped = True

    def _point(self) -> None:
        if self.rank == 0:
            point = {"v": 1, "attempt": self.attempt.number, "step": self.step, "epoch": self.step / STEPS, "time": time.time(), "loss": 1.0}
            with self.attempt.metrics.open("a") as file:
                file.write(json.dumps(point) + "\n")

    def _save(self) -> None:
        if self.rank == 0:
            self._checkpoint(hold=True)
        else:
            self._hold_save()

    def _hold_save(self) -> None:
        self.phase("save", hold_name=f"save-{self.step}" if self.step != 2 else "save")

    def _checkpoint(self, *, hold: bool = False) -> None:
        name = checkpoint_id(self.step)
        folder = self.run_dir.checkpoints / f".{name}.{self.attempt.number}.tmp"
        (folder / "model").mkdir(parents=True, exist_ok=True)
        content = os.urandom(4096)
        (folder / "model/model.safetensors").write_bytes(content[:1000])
        if hold:
            self._hold_save()
        (folder / "model/model.safetensors").write_bytes(content)
        file = {"path": "model/model.safetensors", "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        write_json(folder / "manifest.json", {
            "v": 1, "id": name, "step": self.step, "epoch": self.step / STEPS, "samples_seen": self.step, "tokens_seen": self.step * 10,
            "attempt": self.attempt.number, "created_at": time.time(), "kind": "full", "trigger": "steps", "metrics": {"loss": 1.0},
            "arguments_digest": "x", "files": [file],
        })  # fmt: skip
        target = self.run_dir.checkpoint(name)
        if not target.exists():
            folder.rename(target)

    def _resumed(self) -> int:
        names = self.run_dir.checkpoint_ids()
        return (self.run_dir.manifest(names[-1]) or {})["step"] if names else 0

    def _result(self, status: str, **more: object) -> None:
        record = {"status": status, "steps": STEPS, "total_steps": STEPS, "epochs": 1.0, "samples_seen": 4, "tokens_seen": 40}
        names = self.run_dir.checkpoint_ids()
        last = {"checkpoint": names[-1] if names else None, "train_time_s": 0.1, "warnings": []}
        write_json(self.attempt.result, record | last | more)


if __name__ == "__main__":
    if sys.argv[-1] in ("version", "estimate", "inspect"):
        print(json.dumps({"version": "0", "contract": 1}))
    elif sys.argv[1] == "rank":
        sys.exit(Rank(sys.argv[2]).run())
    else:
        sys.exit(Launcher(sys.argv[1:]).run())
