"""Fail when a test run left a process behind, and end it: `leftovers.py TAG FOLDER`.

A process belongs to the run when it carries the run's tag in its environment, or works in or names the run's folder
of temporary files while it carries a job's marker. A short time is given to those that are just ending.
"""

from __future__ import annotations

import sys

import psutil

MARKER = "POSTTRAIN_JOB_UUID"
GRACE_S = 5.0


def belongs(process: psutil.Process, tag: str, folder: str) -> bool:
    """Whether `process` was started by the run; False for what has ended or may not be looked at."""
    try:
        environment = process.environ()
        if environment.get("TESTRUN_TAG") == tag:
            return True
        if MARKER not in environment:
            return False
        told = [process.cwd(), *process.cmdline(), *environment.values()]
    except psutil.Error:
        return False
    return any(folder in text for text in told)


def main(tag: str, folder: str) -> int:
    """Look, wait for those that are ending, report the rest and end them. Returns the exit code."""
    me = psutil.Process()
    known = {me.pid, *(parent.pid for parent in me.parents())}
    found = [p for p in psutil.process_iter() if p.pid not in known and belongs(p, tag, folder)]
    _, alive = psutil.wait_procs(found, timeout=GRACE_S)
    for process in alive:
        with process.oneshot():
            print(f"left running by the tests: {process.pid} {' '.join(process.cmdline())[:300]}", file=sys.stderr)
        process.kill()
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
