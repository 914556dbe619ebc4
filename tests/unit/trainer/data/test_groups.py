"""Samples of several documents: pairs of answers and blocks of text, from rows to micro-batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from posttrain_trainer.contract.errors import InvalidArguments, InvalidData
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.batch import IGNORE, Group, collate
from posttrain_trainer.data.loader import StepLoader
from posttrain_trainer.data.prepare import prepare_dataset
from posttrain_trainer.data.tokenise import Chunk, cut


def pair(question, chosen, rejected, **fields):
    return {"prompt": question, "chosen": chosen, "rejected": rejected, **fields}


@pytest.fixture
def run(tmp_path, make_tokenizer):
    def prepare_rows(rows, method, *, max_seq_len=64, template="chatml", **arguments):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = FullTrainingArguments(model_path="m", data_path=str(path), ckpt_output_dir=str(tmp_path), method=method, **arguments)
        tokenizer = make_tokenizer(template)
        return prepare_dataset(path, tokenizer=tokenizer, args=args, max_seq_len=max_seq_len, cache_dir=tmp_path / "cache"), tokenizer

    return prepare_rows


DPO = {"kind": "dpo"}
PAIRS = [pair(f"alpha {i}", "beta " * (i + 1) + "end", "no") for i in range(6)]


def test_both_answers_follow_the_prompt_once_and_are_learned_with_their_end(run):
    found, tokenizer = run([pair("alpha prompt.", "beta answer.", [{"role": "assistant", "content": "no"}])], DPO)
    ((chosen, rejected), reference) = found.sample(0)
    assert reference is None
    for (ids, labels), answer in ((chosen, "beta answer."), (rejected, "no")):
        assert tokenizer.decode(ids) == f"<|im_start|>user\nalpha prompt.<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert tokenizer.decode(labels[labels != IGNORE]) == f"{answer}<|im_end|>"
    assert found.lengths.tolist() == [len(chosen[0]) + len(rejected[0])]
    assert found.padded_lengths.tolist() == [2 * len(chosen[0])]
    assert (found.report["samples"], found.report["rows"], found.report["format"]) == (1, 1, "preference")
    again, _ = run([pair("alpha prompt.", "beta answer.", [{"role": "assistant", "content": "no"}])], DPO | {"beta": 0.3})
    assert again.key == found.key  # what is tokenised depends on no number of the loss


def test_a_pair_goes_as_a_whole(run):
    rows = [*PAIRS, pair("long", "word " * 60, "no"), pair("long", "no", "word " * 60)]
    found, _ = run(rows, DPO)
    assert (len(found), found.report["dropped"]) == (6, {"over_length": 2})
    shared = "the same " * 40
    rows = [pair("q", "word " * 60, "no"), pair("q", shared + "a", shared + "b"), pair("word " * 60, "a", "b")]
    found, _ = run(rows, DPO, over_length="truncate_right")
    assert (len(found), found.report["truncated"], found.report["dropped"]) == (1, 1, {"answer_cut_off": 2})
    with pytest.raises(InvalidData, match="each row must be a preference"):
        run([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], DPO)
    with pytest.raises(InvalidData, match="rejected: has no turn of the assistant"):
        run([pair("q", "a", [{"role": "user", "content": "b"}])], DPO)


@pytest.mark.parametrize("packed", [True, False])
def test_pairs_in_a_batch(run, packed):
    found, _ = run(PAIRS, DPO)
    found = found.with_reference(np.arange(12, dtype=np.float32).reshape(6, 2))
    training, held = found.split(0.34, seed=1)
    assert (len(training), len(held)) == (4, 2)
    batch = collate([training.sample(n) for n in range(4)], packed=packed, pad_id=2)
    assert (batch.num_samples, len(batch.lengths)) == (4, 8)
    assert sorted(batch.reference_P2[:, 0].tolist() + [held.sample(n).reference[0] for n in range(2)]) == [0, 2, 4, 6, 8, 10]
    document = batch.document_of_each()
    assert document.shape == batch.input_ids_BS.shape
    supervised = torch.bincount(document[batch.labels_BS != IGNORE], minlength=8).view(4, 2)
    assert supervised.sum(1).tolist() == training.supervised.tolist()
    assert batch.num_tokens == training.lengths.sum()


def test_padded_pairs_count_their_padding(run):
    found, _ = run(PAIRS, DPO)
    rows = int(found.padded_lengths.max())
    options = {"effective_batch_size": 6, "rank": 0, "world_size": 1, "seed": 1, "shuffle": True, "num_epochs": 1, "pad_id": 0}
    step = next(StepLoader(found, max_batch_len=rows, packed=False, **options))
    assert all(batch.input_ids_BS.numel() <= rows for batch in step.micro_batches)
    assert sum(batch.num_samples for batch in step.micro_batches) == step.num_samples == 6
    with pytest.raises(InvalidArguments, match="max_batch_len"):
        StepLoader(found, max_batch_len=rows - 1, packed=False, **options)


def test_thirteen_tokens_in_blocks_of_four_lose_none_and_cross_nothing():
    chunks = [Chunk(ids=[np.arange(7, dtype=np.int32)]), Chunk(ids=[np.arange(7, 13, dtype=np.int32)])]
    pieces = [(ids.tolist(), trained.tolist()) for chunk in cut(chunks, 4) for ids, trained in zip(chunk.ids, chunk.trained, strict=True)]
    assert [ids for ids, _ in pieces] == [[0, 1, 2, 3], [4, 5, 6], [7], [8, 9, 10, 11], [12]]
    assert [sum(trained) for _, trained in pieces] == [3, 2, 0, 3, 0]
    assert all(not trained[0] for _, trained in pieces)


def test_documents_become_full_blocks_whose_terms_are_the_divisor(run):
    texts = ["alpha prompt. beta answer.", "What is the capital of France?", "Paris is the capital."]
    method = {"kind": "pretrain", "block_size": 8}
    found, tokenizer = run([{"text": text} for text in texts], method, template=None)
    whole = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    groups = [found.sample(n) for n in range(len(found))]
    assert all(isinstance(group, Group) for group in groups)
    assert [token for group in groups for ids, _ in group.documents for token in ids.tolist()] == [t for text in whole for t in text]
    assert set(found.lengths[:-1].tolist()) == {8}
    batch = collate(groups, packed=True, pad_id=0)
    pieces = sum(len(group.documents) for group in groups)
    assert batch.num_supervised == int((batch.labels_BS != IGNORE).sum()) == found.supervised.sum() == batch.num_tokens - pieces
    assert batch.num_samples == len(found) < pieces == len(batch.lengths)


def test_a_named_column_an_empty_text_and_one_token_too_many(run):
    method = {"kind": "pretrain", "text_column": "body"}
    found, _ = run([{"body": "alpha"}, {"body": "beta", "text": "not this"}], method)
    assert found.report["rows"] == 2
    with pytest.raises(InvalidData, match="the text is empty"):
        run([{"text": "alpha"}, {"text": " \n"}], {"kind": "pretrain"})
    with pytest.raises(InvalidArguments, match="block_size 128 is beyond max_seq_len"):
        run([{"text": "alpha"}], {"kind": "pretrain", "block_size": 128})
    _, tokenizer = run([{"text": "alpha"}], {"kind": "pretrain"})
    word = "alpha" * 40
    length = len(tokenizer(word)["input_ids"]) + 1
    size = next(n for n in range(8, 64) if length % n == 1)
    found, _ = run([{"text": word}], {"kind": "pretrain", "block_size": size})
    assert (set(found.lengths.tolist()), int(found.supervised.min())) == ({size}, size - 1)  # the lone last token is no sample
