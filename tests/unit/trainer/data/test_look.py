"""What is shown of a data set: where training is on, how long samples are, how they pack."""

import numpy as np

from posttrain_trainer import tools
from posttrain_trainer.data.look import histogram
from posttrain_trainer.testing import tiny_model, tiny_rows, write_rows


def test_histogram_has_no_empty_ends():
    assert histogram(np.array([17, 32, 33, 200], dtype=np.int32)) == [
        {"up_to": 32, "samples": 2}, {"up_to": 64, "samples": 1}, {"up_to": 128, "samples": 0}, {"up_to": 256, "samples": 1},
    ]  # fmt: skip
    assert histogram(np.array([1], dtype=np.int32)) == [{"up_to": 16, "samples": 1}]


def test_examples_show_exactly_what_is_trained_on(tmp_path):
    model = tiny_model(tmp_path / "model")
    rows = tiny_rows(12)
    rows[1]["messages"][1]["content"] = "añswer ✓ 日本 " + rows[1]["messages"][1]["content"]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    asked = {"data_path": str(file), "model_path": str(model), "train_args": {"max_seq_len": 64, "max_batch_len": 64}}
    report = tools.inspect({**asked, "examples": 3})
    assert len(report["examples"]) == 3
    for row, [document] in zip(rows, report["examples"], strict=False):
        answers = [m["content"] + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert [part["text"] for part in document if part["trained"]] == answers
        whole = "".join(part["text"] for part in document)
        assert all(message["content"] in whole for message in row["messages"])
    pack = report["packing"]
    assert pack["micro_batches"] * 64 >= report["tokens"]
    assert 0.5 < pack["efficiency"] <= 1
    assert 0.5 < pack["padded_efficiency"] < 1
    assert sum(bar["samples"] for bar in report["lengths"]) == report["samples"]
    assert "examples" not in tools.inspect(asked)
