"""Preference training as real runs: the same numbers on any number of ranks, and what they leave behind."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.testing import tiny_pairs, write_rows

from .conftest import events, losses, points

pytestmark = pytest.mark.slow

# The loss type whose KL term is a mean over the whole global batch, so that a rank of its own would be seen.
KTO = {"kind": "dpo", "loss_type": "kto_pair", "beta": 0.2}


@pytest.fixture
def pairs(tmp_path):
    return str(write_rows(tmp_path / "pairs.jsonl", tiny_pairs(20)))


def test_preference_training_is_the_same_on_two_ranks_padded_as_on_one_packed(lab, pairs, tmp_path):
    knobs = {"data_path": pairs, "method": KTO, "num_epochs": 2, "validation_split": 0.2, "effective_batch_size": 8, "max_seq_len": 96}
    lab.train(tmp_path / "one", 1, **knobs)
    result = lab.train(tmp_path / "two", 2, is_padding_free=False, **knobs)
    runs = [RunDir(tmp_path / name) for name in ("one", "two")]
    first, second = (points(run) for run in runs)
    assert len(first) == len(second) == 6  # two steps an epoch, and a validation after each
    for a, b in zip(first, second, strict=True):
        names = {"loss", "accuracy", "rewards_chosen", "rewards_rejected", "rewards_margin", "validation_loss", "validation_accuracy"} & set(a)
        assert names in ({"validation_loss", "validation_accuracy"}, {"loss", "accuracy", "rewards_chosen", "rewards_rejected", "rewards_margin"})
        assert "validation_perplexity" not in a
        for name in names | ({"grad_norm"} & set(a)):
            assert a[name] == pytest.approx(b[name], abs=1e-4, rel=1e-3), name
    steps = [point for point in first if "loss" in point]
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-6)  # both log-ratios are 0 and so is the KL term
    assert steps[-1]["rewards_margin"] > 0.1
    assert steps[-1]["accuracy"] == 1.0
    assert result.samples_seen == 32
    assert [path.suffix for path in (tmp_path / "one" / "data").glob("reference-*")] == [".npy"]
    weights = [load_file(run.checkpoint(run.checkpoint_ids()[-1]) / "model" / "model.safetensors") for run in runs]
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-3


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads an attribute by its old name
def test_an_adapter_on_a_four_bit_base_learns_preferences_on_two_ranks(lab, pairs, tmp_path):
    pytest.importorskip("bitsandbytes")
    method = {"kind": "dpo", "precompute_reference": False}
    result = lab.train(
        tmp_path / "run", 2, data_path=pairs, method=method, lora={"rank": 4, "quantize_base": True}, learning_rate=1e-2, num_epochs=1
    )
    run = RunDir(tmp_path / "run")
    seen = losses(run)
    assert seen[1] == pytest.approx(0.6931472, abs=1e-5)
    assert seen[3] < 0.6
    assert any("4 bits (NF4)" in event["message"] for event in events(run))
    ids = torch.arange(12)[None]
    base = AutoModelForCausalLM.from_pretrained(lab.model)
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, run.checkpoint(result.checkpoint) / "model")(ids).logits
    assert (adapted - before).abs().max() > 1e-2
