"""A few rounds of `make chaos`, always the same ones; and that a round would notice what it is there for."""

from __future__ import annotations

import pytest
from chaos_lab import Lab
from chaos_rounds import Check, Round

ROUNDS = [
    Round("server", "launching", "SIGKILL", delay_s=0.02),
    Round("shim", "train", "SIGKILL", retry=True),
    Round("torchrun", "stopping", "SIGTERM", "pause"),
    Round("rank", "data", "SIGKILL", ranks=1),
    Round("rank", "train", "SIGSTOP"),
    Round("all", "save", "SIGKILL"),
]


@pytest.mark.slow
@pytest.mark.parametrize("one", ROUNDS, ids=str)
def test_nothing_is_lost_doubled_or_untrue(chaos_lab: Lab, one: Round) -> None:
    assert one.run(chaos_lab).violations == []


@pytest.mark.slow
def test_a_violation_is_noticed(chaos_lab: Lab) -> None:
    one = Round("server", "train", "none")
    job, waiting = chaos_lab.submit("quick"), chaos_lab.submit("quick")
    one._settle(chaos_lab, job, waiting)
    check = Check(one, chaos_lab, job, waiting)
    check.all()
    assert one.violations == []
    chaos_lab.accepted.append("never-made")
    (chaos_lab.run_dir(job).path / "starts").write_text("1\n1\n")
    (chaos_lab.run_dir(waiting).path / "overlap").touch()
    chaos_lab.run_dir(job).attempt(1).result.unlink()
    weights = chaos_lab.run_dir(job).checkpoint("step-000002") / "model/model.safetensors"
    weights.write_bytes(b"x" * weights.stat().st_size)
    check.all()
    chaos_lab.accepted.remove("never-made")
    assert {fault.partition(":")[0] for fault in one.violations} == {"listed", "once", "true_end", "checkpoints"}
    assert len(one.violations) == 5
