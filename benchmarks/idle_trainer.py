"""Stands in for torchrun and its rank in `service_load.py`: beats, writes a metrics point at a pace, and keeps a core busy if told.

    python benchmarks/idle_trainer.py ... rank ATTEMPT_DIR

The first row of the job says what to do: "pace=2" points a second, "busy=1" computes for ever in between.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from posttrain_trainer.contract.locks import Lock
from posttrain_trainer.contract.rundir import AttemptDir, read_json, write_json


def main() -> int:
    """Run until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    attempt = AttemptDir(Path(sys.argv[-1]))
    lock = Lock(attempt.run_lock, shared=True)
    row = json.loads(Path(read_json(attempt.arguments)["train_args"]["data_path"]).read_text().splitlines()[0])
    told = dict(word.split("=") for word in row["messages"][0]["content"].split())
    pace, busy, step = float(told.get("pace", 0)), told.get("busy") == "1", 0
    while True:
        step += pace > 0
        beat = {"time": time.time(), "phase": "train", "step": step, "total_steps": 10**6, "epoch": step / 10**6}
        write_json(attempt.heartbeat, beat, durable=False)
        if pace:
            point = {"v": 1, "attempt": attempt.number, "step": step, "epoch": step / 10**6, "time": time.time(), "loss": 1.0, "tokens_per_s": 500.0}
            with attempt.metrics.open("a") as file:
                file.write(json.dumps(point) + "\n")
        end = time.monotonic() + (1 / pace if pace else 2.0)
        while busy and time.monotonic() < end:
            sum(range(10_000))
        time.sleep(max(0.0, end - time.monotonic()))
    lock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
