"""Two ranks are one rank: real processes over gloo, since sharding can only be seen wrong across them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain_trainer.testing import run_ranks

SCRIPT = Path(__file__).with_name("ranks.py")
VARIANTS = {
    "full": {},
    "grad_op": {"fsdp": {"sharding": "grad_op"}, "activation_checkpointing": True},
    "none": {"fsdp": {"sharding": "none"}},
    "lora": {"lora": {"rank": 4}},
    "dora": {"lora": {"rank": 4, "use_dora": True, "use_rslora": True}},
}


@pytest.fixture(scope="module")
def results(tiny):
    """The same runs on one rank and on two."""
    return [[json.loads(out) for out in run_ranks(SCRIPT, size, str(tiny), json.dumps(VARIANTS), timeout_s=240)] for size in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradient_norms_agree(results, variant):
    [one], two = results
    alone = one["runs"][variant]
    assert alone["losses"][-1] < alone["losses"][0] - 0.05
    for rank in two:
        assert rank["runs"][variant]["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert rank["runs"][variant]["norms"] == pytest.approx(alone["norms"], rel=1e-3)


@pytest.mark.slow
def test_each_rank_keeps_its_share(results):
    [one], two = results
    whole = one["runs"]["full"]["local"]
    assert [rank["runs"]["full"]["local"] for rank in two] == [whole // 2, whole // 2]
    assert [rank["runs"]["none"]["local"] for rank in two] == [whole, whole]


@pytest.mark.slow
def test_two_copies_of_two_shards_are_one_rank(results, tiny):
    hybrid = {"hybrid": {"fsdp": {"sharding": "hybrid", "shard_ranks": 2}}}
    four = [json.loads(out)["runs"]["hybrid"] for out in run_ranks(SCRIPT, 4, str(tiny), json.dumps(hybrid), timeout_s=240)]
    [one], _ = results
    alone = one["runs"]["full"]
    for rank in four:
        assert rank["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-3)
        assert rank["local"] == alone["local"] // 2


@pytest.mark.slow
def test_ranks_talk(results):
    for number, rank in enumerate(results[1]):
        facts = rank["facts"]
        assert (facts["sum"], facts["any"], facts["broadcast"]) == ([2.0, 2.0], [True, False], {"from": 0})
        assert facts["together"] == [[number, "disk_full", 1, "DiskFull" if number == 0 else "OSError"]] * 2
