"""A preference job over HTTP, from bad rows to its adapter; and real rows of preferences and documents, tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain_service.cli.demo_download import fetch
from posttrain_service.client import ApiError, Client
from posttrain_trainer.testing import tiny_model, tiny_pairs, tiny_rows, write_rows

from .test_real_run import wait_for

METHOD = {"kind": "dpo", "beta": 0.2, "label_smoothing": 0.05}


@pytest.mark.slow
def test_a_preference_job_over_http(served: Any, tmp_path: Path) -> None:
    tiny_model(served.storage / "models" / "tiny")
    with Client(served.address) as client:
        good = client.upload(write_rows(tmp_path / "pairs.jsonl", tiny_pairs(24)))["id"]
        bad = client.upload(write_rows(tmp_path / "mixed.jsonl", tiny_pairs(2) + tiny_rows(1)))["id"]
        assert client.validate(good, method=METHOD)["format"] == "preference"
        report = client.validate(bad, method=METHOD)
        assert (report["valid"], [error["line"] for error in report["errors"]]) == (False, [3])
        request = {
            "model": "tiny", "dataset": good, "method": METHOD, "adapter": {"kind": "lora", "rank": 4},
            "training": {"effective_batch_size": 8, "max_seq_len": 128, "learning_rate": 1e-2, "validation_split": 0.2},
        }  # fmt: skip
        with pytest.raises(ApiError) as caught:
            client.create_job(request | {"dataset": bad})
        assert "each row must be a preference" in str(caught.value)
        plan = client.plan(request)
        assert (plan["steps"], plan["spec"]["method"]["label_smoothing"]) == (3, 0.05)
        assert plan["spec"]["training"]["max_batch_len"] == 4096
        job = client.create_job(request)["job_uuid"]
        ended = wait_for(client, job, lambda now: now["status"] in ("succeeded", "failed", "cancelled"))
        assert (ended["status"], ended["method"]) == ("succeeded", "dpo"), ended["error"]
        steps = [point for point in client.metrics(job) if "loss" in point]
        folder = fetch(client, job, tmp_path / "downloaded")
    assert steps[0]["loss"] == pytest.approx(0.6931472, abs=1e-4)
    assert steps[-1]["rewards_margin"] > steps[0]["rewards_margin"] == pytest.approx(0, abs=1e-4)
    assert (folder / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_real_preferences_and_documents(smollm2: Path, real_data: Path, tmp_path: Path) -> None:
    from posttrain_trainer.contract.spec import FullTrainingArguments
    from posttrain_trainer.data.prepare import prepare_dataset
    from posttrain_trainer.models.load import load_tokenizer

    def prepared(name: str, method: dict[str, Any]) -> tuple[Any, Any]:
        args = FullTrainingArguments(model_path=str(smollm2), data_path=str(real_data / name), ckpt_output_dir=str(tmp_path), method=method)
        tokenizer = load_tokenizer(args)
        return prepare_dataset(args.data_path, tokenizer=tokenizer, args=args, max_seq_len=2048, cache_dir=tmp_path), tokenizer

    pairs, tokenizer = prepared("dpo.preference.jsonl", {"kind": "dpo"})
    assert (pairs.report["rows"], pairs.report["invalid"]) == (299, 0)
    assert len(pairs) + pairs.report["dropped"].get("over_length", 0) == 299
    assert len(pairs) > 250
    for number in range(0, len(pairs), 25):
        (chosen, chosen_labels), (rejected, _) = pairs.sample(number).documents
        start = int(np.flatnonzero(chosen_labels >= 0)[0]) + 1
        assert tokenizer.decode(chosen[:start]) == tokenizer.decode(rejected[:start])  # the prompt, once in each
        assert tokenizer.decode(chosen[:start]).endswith("<|im_start|>assistant\n")
        assert tokenizer.decode(chosen[start:]).count("<|im_end|>") == 1
    blocks, tokenizer = prepared("c4.documents.jsonl", {"kind": "pretrain", "block_size": 512})
    assert blocks.report["rows"] == 300
    assert set(blocks.lengths[:-1].tolist()) == {512}
    documents = sum(1 for n in range(len(blocks)) for ids, _ in blocks.sample(n).documents if ids[-1] == tokenizer.eos_token_id)
    assert documents == 300
