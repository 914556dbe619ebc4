"""The same numbers however samples fall into ranks, packs and micro-batches; and what people load afterwards."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain_trainer.contract.rundir import RunDir

from .conftest import STEPS_PER_EPOCH, events, losses, points

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # minutes only where others use the machine as well

TOLERANCE = 1e-4


def assert_same_losses(first: RunDir, second: RunDir) -> None:
    one, two = losses(first), losses(second)
    assert list(one) == list(two) == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert max(abs(one[step] - two[step]) for step in one) < TOLERANCE


def test_two_ranks_train_as_one_does(unbroken):
    assert_same_losses(unbroken(1), unbroken(2))
    first, second = unbroken(1), unbroken(2)
    for a, b in zip(points(first), points(second), strict=True):
        for key in ("step", "epoch", "tokens", "supervised_tokens", "samples", "learning_rate"):
            assert a[key] == b[key], key
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    weights = [load_file(run.checkpoint("step-000010") / "model" / "model.safetensors") for run in (first, second)]
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-3


def test_padded_and_accumulated_training_is_packed_training(lab, unbroken, tmp_path):
    lab.train(tmp_path, is_padding_free=False, max_batch_len=128)
    assert_same_losses(unbroken(1), RunDir(tmp_path))


def test_loss_falls_and_the_whole_model_generates_with_plain_transformers(unbroken):
    run_dir = unbroken(1)
    seen = losses(run_dir)
    assert seen[10] < seen[1] - 0.3
    folder = run_dir.checkpoint("step-000010") / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "name it"}], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > ids.shape[1]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads an attribute by its old name
def test_an_adapter_of_two_ranks_loads_with_plain_peft_and_merged(lab, tmp_path):
    result = lab.train(tmp_path, 2, lora={"rank": 4}, learning_rate=1e-2, merge_lora=True, num_epochs=1, validation_split=0.1, keep_best=1)
    assert result.status == "completed"
    folder = RunDir(tmp_path).checkpoint(result.checkpoint)
    ids = torch.arange(12)[None]
    base = AutoModelForCausalLM.from_pretrained(lab.model)
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, folder / "model")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")(ids).logits
    assert (adapted - merged).abs().max() < 1e-3
    assert (adapted - before).abs().max() > 1e-2
    validated = [point for point in points(RunDir(tmp_path)) if "validation_loss" in point]
    assert len(validated) == 1
    manifest = RunDir(tmp_path).manifest(result.checkpoint)
    assert manifest["kind"] == "adapter"
    assert manifest["metrics"]["validation_loss"] == validated[0]["validation_loss"]
    assert manifest["metrics"]["validation_loss"] < 6.2


def test_the_record_of_a_run_is_complete(unbroken):
    run_dir = unbroken(2)
    result = json.loads(run_dir.attempt(1).result.read_text())
    assert (result["status"], result["steps"], result["total_steps"], result["epochs"]) == ("completed", 10, 10, 2.0)
    assert set(result["startup_s"]) >= {"import", "load", "data", "first_step"}
    assert result["dataset"]["rows"] == 40
    assert result["tokens_seen"] == 2 * result["dataset"]["tokens"]
    assert run_dir.checkpoint_ids() == ["step-000005", "step-000010"]
    assert [run_dir.manifest(name)["trigger"] for name in run_dir.checkpoint_ids()] == ["epoch", "end"]
    assert [event["type"] for event in events(run_dir)].count("checkpoint") == 2
    heartbeat = json.loads(run_dir.attempt(1).heartbeat.read_text())
    assert (heartbeat["step"], heartbeat["total_steps"], heartbeat["eta_s"]) == (10, 10, 0.0)
    assert run_dir.attempt(1).log_sources() == ["torchrun", "rank-0", "rank-1"]
