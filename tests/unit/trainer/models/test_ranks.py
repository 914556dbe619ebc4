"""Two ranks are one rank: real processes over gloo, since sharding can only be seen wrong across them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
def saved(tmp_path_factory):
    """Where two ranks save adapters whose shards say whose they are."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def results(tiny, saved):
    """The same runs on one rank and on two."""
    argv = str(tiny), json.dumps(VARIANTS)
    return [[json.loads(out) for out in run_ranks(SCRIPT, size, *argv, *more, timeout_s=240)] for size, more in ((1, ()), (2, (str(saved),)))]


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
@pytest.mark.parametrize("way", ["at-once", "beside"])
def test_a_saved_adapter_has_the_slices_of_every_rank(results, saved, way):
    shares = [rank["facts"]["rows"] for rank in results[1]]
    adapter = load_file(saved / way / "checkpoints" / "step-000001" / "model" / "adapter_model.safetensors")
    assert len(adapter) == len(shares[0]) > 10
    for name, share in shares[0].items():
        tensor = adapter[name.removeprefix("model.").replace(".default", "")]
        assert len(tensor) == share + shares[1][name]
        for rank, part in enumerate(tensor.split([share, shares[1][name]])):
            assert torch.equal(part.flatten(), torch.arange(part.numel()) + 100_000.0 * (rank + 1)), (name, rank)


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
