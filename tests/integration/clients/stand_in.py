"""Stands in for torchrun and its one rank, without torch: writes what a run writes, and obeys stops.

What it does is said by the first row of its data set: `wait` (at step 2, until the run's folder has a file `go`), `fail`.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from pathlib import Path

from posttrain_trainer.contract.locks import Lock
from posttrain_trainer.contract.rundir import AttemptDir, RunDir, checkpoint_id, read_json, write_json

STEPS = 4
stopped = False


def on_term(_number: int, _frame: object) -> None:
    global stopped
    stopped = True


def save(run: RunDir, attempt: AttemptDir, step: int) -> None:
    folder = run.checkpoint(checkpoint_id(step))
    if folder.exists():
        return
    part = run.checkpoints / f".{step}.tmp"
    (part / "model").mkdir(parents=True)
    data = json.dumps({"step": step}).encode()
    (part / "model/config.json").write_bytes(data)
    file = {"path": "model/config.json", "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_json(part / "manifest.json", {
        "v": 1, "id": folder.name, "step": step, "epoch": step / STEPS, "samples_seen": step, "tokens_seen": 10 * step,
        "attempt": attempt.number, "created_at": time.time(), "kind": "full", "trigger": "steps",
        "metrics": {"loss": 1 / step, "validation_loss": 2 / step}, "arguments_digest": "x", "files": [file],
    })  # fmt: skip
    part.rename(folder)


def main(attempt: AttemptDir) -> int:
    run = RunDir(attempt.path.parent.parent)
    args = read_json(attempt.arguments)["train_args"]
    first = Path(args["data_path"]).read_text().splitlines()[0]
    signal.signal(signal.SIGTERM, on_term)
    lock = Lock(attempt.run_lock, shared=True)
    result = {"epochs": 1.0, "samples_seen": 4, "tokens_seen": 40, "train_time_s": 0.1, "total_steps": STEPS, "warnings": []}
    names = run.checkpoint_ids()
    done = int(names[-1].removeprefix("step-")) if names else 0
    for step in range(done + 1, STEPS + 1):
        point = {"attempt": attempt.number, "step": step, "epoch": step / STEPS, "time": time.time(), "loss": 1 / step, "accuracy": 0.5}
        point |= {"validation_loss": 2 / step, "validation_accuracy": 0.25} if step % 2 == 0 else {}
        with attempt.metrics.open("a") as file:
            file.write(json.dumps(point) + "\n")
        beat = {"time": time.time(), "phase": "train", "step": step, "total_steps": STEPS, "epoch": step / STEPS, "tokens_seen": 10 * step}
        write_json(attempt.heartbeat, beat, durable=False)
        if step % 2 == 0:
            save(run, attempt, step)
        while step == 2 and "wait" in first and not (run.path / "go").exists() and not stopped:
            time.sleep(0.01)
        if stopped:
            want = (read_json(attempt.stop) or {}).get("want")
            write_json(attempt.result, result | {"status": "stopped", "want": want, "steps": step})
            return 1
    if "fail" in first:
        error = {"code": "out_of_memory", "message": "no memory left", "rank": 0, "exit_code": 1, "details": {}, "retryable": False}
        write_json(attempt.error(0), error)
        return 1
    write_json(attempt.result, result | {"status": "completed", "steps": STEPS})
    lock.release()
    return 0


if __name__ == "__main__":
    if sys.argv[-1] in ("version", "estimate", "inspect"):
        print(json.dumps({"version": "0", "contract": 1}))
    else:
        sys.exit(main(AttemptDir(Path(sys.argv[-1]))))
