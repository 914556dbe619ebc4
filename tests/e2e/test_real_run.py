"""A real model on real data through the service, which is killed and started again on the way."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain_service.cli.demo_download import fetch
from posttrain_service.client import Client

STEPS = 40
EPOCHS = 2


def shortest_rows(source: Path, target: Path, count: int) -> Path:
    """The shortest rows of a file: the test shall be about the run, not about waiting for long answers."""
    lines = sorted(source.read_text(encoding="utf-8").splitlines(), key=len)[:count]
    target.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return target


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_goes_on_while_the_service_is_killed_and_the_model_loads_with_plain_transformers(
    served: Any, place_model: Callable[[Path], str], real_data: Path, tmp_path: Path
) -> None:
    rows = shortest_rows(real_data / "gsm8k_test.messages.jsonl", tmp_path / "rows.jsonl", STEPS // EPOCHS)
    model = place_model(served.storage / "models")
    with Client(served.address) as client:
        file_id = client.upload(rows)["id"]
        report = client.validate(file_id, model=model)
        assert (report["valid"], report["rows"]) == (True, STEPS // EPOCHS)
        request = {
            "model": model,
            "dataset": file_id,
            "training": {
                "num_epochs": EPOCHS, "effective_batch_size": 1, "max_seq_len": 512, "max_batch_len": 512, "learning_rate": 5e-5, "warmup_steps": 5,
            },
            "checkpoints": {"keep_last": 1},
        }
        job = client.create_job(request)["job_uuid"]
        wait_for(client, job, lambda now: (now["progress"] or {}).get("step", 0) >= 5)
        served.kill()
        served.start()
        ended = wait_for(client, job, lambda now: now["status"] in ("succeeded", "failed", "cancelled"), 600)
        assert (ended["status"], ended["reason"], ended["attempt"]) == ("succeeded", "completed", 1), ended["error"]
        points = client.metrics(job)
        folder = fetch(client, job, tmp_path / "downloaded")
    assert [point["step"] for point in points] == list(range(1, STEPS + 1))
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(points))
    losses = [point["loss"] for point in points]
    first, second = losses[: STEPS // EPOCHS], losses[STEPS // EPOCHS :]  # the same rows, so their difference is what was learned
    assert statistics.mean(second) < statistics.mean(first) - 0.2
    assert generated(folder, "What is the capital of France?").strip()


def wait_for(client: Client, job: str, check: Callable[[dict[str, Any]], bool], deadline_s: float = 240.0) -> dict[str, Any]:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        now = client.job(job)
        assert now["status"] != "failed", now["error"]
        if check(now):
            return now
        time.sleep(0.2)
    pytest.fail(f"job {job} is still {now['status']} after {deadline_s} s: {now['progress']}")


def generated(folder: Path, question: str) -> str:
    """The answer of the folder as plain transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
