"""From file to cached data set: what is kept, dropped, refused, reported; and the cache that never lies."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest

from posttrain_trainer.contract.errors import DiskFull, InvalidData
from posttrain_trainer.contract.locks import hold
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data import cache, prepare
from posttrain_trainer.data.cache import order
from posttrain_trainer.data.prepare import prepare_dataset


def chat(question, answer, **fields):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **fields}


ROWS = [chat(f"alpha {i}", "beta " * (1 + i % 5) + "end") for i in range(20)]


@pytest.fixture
def run(tmp_path, make_tokenizer):
    """Prepare rows (or bytes) with these arguments; the cache is the test's own."""

    def prepare_rows(rows, *, template="chatml", max_seq_len=512, name="rows.jsonl", **arguments):
        data = rows if isinstance(rows, bytes) else "\n".join(json.dumps(row) for row in rows).encode()
        path = tmp_path / name
        path.write_bytes(data)
        args = FullTrainingArguments(model_path="m", data_path=str(path), ckpt_output_dir=str(tmp_path), **arguments)
        return prepare_dataset(path, tokenizer=make_tokenizer(template), args=args, max_seq_len=max_seq_len, cache_dir=tmp_path / "cache")

    return prepare_rows


def decoded(dataset, tokenizer):
    out = []
    for number in range(len(dataset)):
        ids, labels = dataset.sample(number)
        assert ids.dtype == labels.dtype == np.int32
        assert ids.shape == labels.shape
        assert (len(ids), int((labels != -100).sum())) == (dataset.lengths[number], dataset.supervised[number])
        assert labels[-1] == -100
        assert (labels[:-1][labels[:-1] != -100] == ids[1:][labels[:-1] != -100]).all()
        out.append((tokenizer.decode(ids), tokenizer.decode(labels[labels != -100])))
    return out


def test_samples_come_back_as_the_template_renders_them(run, make_tokenizer):
    dataset = run(ROWS)
    want = [
        (f"<|im_start|>user\nalpha {i}<|im_end|>\n<|im_start|>assistant\n{row['messages'][1]['content']}<|im_end|>\n", f"{row['messages'][1]['content']}<|im_end|>")
        for i, row in enumerate(ROWS)
    ]
    assert decoded(dataset, make_tokenizer("chatml")) == want
    report = dataset.report
    assert (report["rows"], report["samples"], report["invalid"], report["dropped"], report["warnings"]) == (20, 20, 0, {}, [])
    assert report["tokens"] == int(dataset.lengths.sum())
    assert report["supervised_tokens"] == int(dataset.supervised.sum())
    assert report["max_len"] == int(dataset.lengths.max())
    json.dumps(report, allow_nan=False)


def test_rows_of_exactly_the_limit_and_short_answers_stay(run):
    longest = int(run(ROWS).lengths.max())
    assert len(run(ROWS, max_seq_len=longest)) == 20
    short = run(ROWS, max_seq_len=longest - 1)
    assert 0 < len(short) < 20
    assert short.report["dropped"] == {"over_length": 20 - len(short)}
    assert len(run([chat("alpha", "x")])) == 1


def test_truncation_keeps_what_can_be_learned_and_drops_the_rest(run, make_tokenizer):
    rows = [chat("alpha", "beta " * 50), chat("alpha " * 60, "beta")]
    whole = run(rows)
    limit = int(whole.lengths[0]) - 10
    cut = run(rows, max_seq_len=limit, over_length="truncate_right")
    assert (len(cut), cut.report["truncated"], cut.report["dropped"]) == (1, 1, {"answer_cut_off": 1})
    assert cut.report["dropped_lines"] == {"answer_cut_off": [2]}
    assert cut.lengths.tolist() == [limit]
    assert cut.sample(0)[0].tolist() == whole.sample(0)[0][:limit].tolist()


@pytest.mark.parametrize(("over_length", "reason"), [("drop", "over_length"), ("truncate_right", "answer_cut_off")])
def test_a_set_of_prompts_longer_than_the_limit_is_refused(run, over_length, reason):
    rows = [chat("a b " * 100, "short answer")] * 8
    with pytest.raises(InvalidData, match=f"nothing to learn: 8 rows, 8 dropped as {reason} .*raise max_seq_len") as caught:
        run(rows, max_seq_len=64, over_length=over_length)
    assert caught.value.details["dropped"] == {reason: 8}


def test_rows_without_an_answer_are_bad_rows_unless_their_turns_are_trained_on(run):
    only_asked = {"messages": [{"role": "user", "content": "alpha"}]}
    rows = [*ROWS[:2], only_asked, chat("a", "b", id=7)]
    with pytest.raises(InvalidData, match=r"1 bad row in the 4 .*line 3: has no turn of the assistant"):
        run(rows)
    dataset = run(rows, invalid_rows="skip")
    assert (len(dataset), dataset.report["invalid"], dataset.report["dropped"]) == (3, 1, {})
    assert dataset.report["ignored"] == {"id": 1}
    assert dataset.report["warnings"] == [
        "1 of 4 rows left out as invalid",
        "1 of 4 rows hold the key 'id', which means nothing in their format and is left out (lines [4])",
    ]
    assert len(run([only_asked], train_on="all")) == 1


def test_bad_rows_end_the_run_with_their_lines(run):
    rows = b"\n".join(json.dumps(row).encode() for row in ROWS[:3]) + b'\n{"messages": [\n' + b'{"text": "x"}\n' + json.dumps(ROWS[3]).encode()
    with pytest.raises(InvalidData, match=r"2 bad rows in the 6 .*line 4: not JSON.*invalid_rows: skip") as caught:
        run(rows)
    assert [error["line"] for error in caught.value.details["errors"]] == [4, 5]
    dataset = run(rows, invalid_rows="skip")
    assert (len(dataset), dataset.report["invalid"]) == (4, 2)
    assert [error["line"] for error in dataset.report["errors"]] == [4, 5]
    with pytest.raises(InvalidData, match=r"more than max_invalid_rows \(1\) allows"):
        run(rows, invalid_rows="skip", max_invalid_rows=1)


def test_rows_that_the_template_refuses_are_bad_rows(run):
    row = {"messages": [{"role": "system", "content": "x"}, *ROWS[0]["messages"]]}
    with pytest.raises(InvalidData, match="line 2: the model's chat template cannot render these turns: System role not supported"):
        run([ROWS[0], row], template="gemma")


def test_a_file_that_ends_early_is_refused_even_when_skipping(run):
    packed = gzip.compress("\n".join(json.dumps(row) for row in ROWS * 50).encode())
    with pytest.raises(InvalidData, match="cannot be read to its end"):
        run(packed[: len(packed) - 20], name="rows.jsonl.gz", invalid_rows="skip")


def test_empty_and_missing_files(run, tmp_path, make_tokenizer):
    with pytest.raises(InvalidData, match="holds no rows"):
        run(b"")
    args = FullTrainingArguments(model_path="m", data_path="gone", ckpt_output_dir=str(tmp_path))
    with pytest.raises(InvalidData, match="No such file"):
        prepare_dataset(tmp_path / "gone", tokenizer=make_tokenizer("chatml"), args=args, max_seq_len=64, cache_dir=tmp_path)


def test_the_cache_is_used_and_equal(run, monkeypatch):
    first = run(ROWS)
    monkeypatch.setattr(prepare, "row_chunks", lambda *_: pytest.fail("the rows were read again"))
    second = run(ROWS)
    assert second.report == first.report
    assert [[part.tolist() for part in second.sample(i)] for i in range(20)] == [[part.tolist() for part in first.sample(i)] for i in range(20)]


@pytest.mark.parametrize("change", [{"max_seq_len": 511}, {"train_on": "all"}, {"template": "granite"}, {"over_length": "truncate_right"}])
def test_whatever_changes_the_tokens_changes_the_cache(run, tmp_path, change):
    run(ROWS)
    run(ROWS, **change)
    run(ROWS[:-1])
    assert len(list((tmp_path / "cache").glob("tokens-*"))) == 3


def test_a_cut_cache_is_made_anew(run, tmp_path):
    last = run(ROWS).sample(19)[0].tolist()
    (folder,) = (tmp_path / "cache").iterdir()
    with (folder / "ids.bin").open("r+b") as file:
        file.truncate(100)
    assert run(ROWS).sample(19)[0].tolist() == last


def test_progress_is_told_and_may_end_it(tmp_path, make_tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS * 30))
    args = FullTrainingArguments(model_path="m", data_path=str(path), ckpt_output_dir=str(tmp_path))
    done: list[int] = []

    def stop_at(rows):
        done.append(rows)
        if rows > 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(path, tokenizer=make_tokenizer("chatml"), args=args, max_seq_len=64, cache_dir=tmp_path / "cache", progress=stop_at)
    assert done == [256, 512]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_or_killed_preparation_leaves_nothing(run, tmp_path):
    with pytest.raises(InvalidData):
        run([*ROWS, {"bad": 1}])
    assert list((tmp_path / "cache").iterdir()) == []
    dead, alive = (tmp_path / "cache" / f".preparing-{name}" for name in ("dead", "alive"))
    for folder in (dead, alive):
        (folder / "data").mkdir(parents=True)
        (folder / ".lock").touch()
    with hold(alive / ".lock"):
        run(ROWS)
        assert (dead.exists(), alive.exists()) == (False, True)


def test_a_full_disk_has_its_own_error(run, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(cache, "write_json", full)
    with pytest.raises(DiskFull, match="free some space"):
        run(ROWS)


def test_split_parts_are_disjoint_reproducible_and_counted(run):
    dataset = run(ROWS)
    training, held = dataset.split(0.2, 5)
    assert (len(training), len(held)) == (16, 4)
    ids = [tuple(part.sample(i)[0].tolist()) for part in (training, held) for i in range(len(part))]
    assert sorted(ids) == sorted(tuple(dataset.sample(i)[0].tolist()) for i in range(20))
    assert training.report["tokens"] + held.report["tokens"] == dataset.report["tokens"]
    assert held.lengths.tolist() == dataset.split(0.2, 5)[1].lengths.tolist()
    assert any(dataset.split(0.2, seed)[1].sample(0)[0].tolist() != held.sample(0)[0].tolist() for seed in range(6, 12))
    assert len(dataset.split(0.001, 5)[1]) == 1
    with pytest.raises(InvalidData, match="cannot be split"):
        run(ROWS[:1]).split(0.5, 0)


def test_the_order_is_a_permutation_and_the_same_for_ever():
    assert sorted(order(1000, 3, 1).tolist()) == list(range(1000))
    assert order(1000, 3, 1).tolist() != order(1000, 3, 2).tolist() != order(1000, 4, 1).tolist()
    assert order(8, 42, 0).tolist() == [4, 1, 6, 3, 5, 0, 2, 7]
    places = np.mean([order(100, seed, 0) for seed in range(400)], axis=0)
    assert (abs(places - 49.5) < 8).all(), "no place prefers any sample"


@pytest.mark.slow
def test_several_processes_give_the_same_and_name_the_same_lines(run, monkeypatch, tmp_path):
    """Spawns two processes: the only way to see that tokeniser, rows and results cross over whole."""
    rows = [*ROWS * 30, {"bad": 1}, *ROWS]
    alone = run(rows, invalid_rows="skip")
    (folder,) = (tmp_path / "cache").iterdir()
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    monkeypatch.setattr(prepare, "_processes", lambda _: 2)
    together = run(rows, invalid_rows="skip")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
    assert together.report == alone.report
    assert together.report["errors"][0]["line"] == 601


def test_real_conversations(real_data, run):
    data = (real_data / "gsm8k_test.messages.jsonl").read_bytes().splitlines()[:100]
    dataset = run(b"\n".join(data), template="llama3", max_seq_len=4096)
    assert len(dataset) == 100
    assert (dataset.supervised > 5).all()


PREPARING = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data import prepare

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    prepare._processes = lambda path: 2
    args = FullTrainingArguments(model_path="m", data_path=str(folder / "rows.jsonl"), ckpt_output_dir=str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    done = lambda rows: (print(rows, flush=True), sys.stdin.readline())
    prepare.prepare_dataset(folder / "rows.jsonl", tokenizer=tokenizer, args=args, max_seq_len=512, cache_dir=folder / "cache", progress=done)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path, make_tokenizer):
    """Spawns a preparation and kills it with -9: only the kernel can show that its processes go, too."""
    make_tokenizer("chatml").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS * 100))
    (tmp_path / "preparing.py").write_text(PREPARING)
    parent = subprocess.Popen([sys.executable, tmp_path / "preparing.py", tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout.readline() == b"256\n", "it works, and waits for a line that never comes"
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) >= 2
    finally:
        parent.kill()
        parent.communicate()
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
    assert len(gone) == len(workers)
