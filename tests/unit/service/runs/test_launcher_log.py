"""torchrun's summary of a failure, as torch 2.13 writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain_service.runs.launcher_log import killed_rank

SUMMARY = """
======================================================
posttrain_trainer FAILED
------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 71)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : here
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 70)
  error_file: <N/A>
  traceback : Signal {code} received by PID 70
======================================================
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-9, "lost"), (-15, "lost"), (-11, "trainer_error"), (-6, "trainer_error"), (1, None), (0, None), (-250, None)],
)
def test_the_first_rank_that_a_signal_ended(tmp_path: Path, code: int, expected: str | None) -> None:
    log = tmp_path / "torchrun.log"
    log.write_text("x" * 20_000 + SUMMARY.format(code=code))
    error = killed_rank(log)
    assert (error and (error["code"], error["rank"], error["exit_code"])) == (expected and (expected, 3, code))


@pytest.mark.parametrize("content", [None, b"", b"rank : 0\nexitcode : -9", b"\xff\xfe Root Cause (first observed failure):\n"])
def test_a_log_without_a_summary_tells_nothing(tmp_path: Path, content: bytes | None) -> None:
    log = tmp_path / "torchrun.log"
    if content is not None:
        log.write_bytes(content)
    assert killed_rank(log) is None
