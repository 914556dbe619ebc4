"""Collation: labels stay with their tokens and never cross documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain_trainer.data.batch import IGNORE, collate
from posttrain_trainer.data.tokenise import shifted_labels

torch.set_num_threads(1)


def sample(ids, trained):
    ids = np.array(ids, dtype=np.int32)
    return ids, shifted_labels(ids, np.array(trained, dtype=bool), IGNORE)


A = sample([5, 6, 7, 8], [0, 0, 1, 1])
B = sample([9, 2], [1, 1])


def test_labels_are_the_learned_token_that_follows():
    assert A[1].tolist() == [IGNORE, 7, 8, IGNORE]
    assert B[1].tolist() == [2, IGNORE], "the first token follows nothing, the last predicts nothing"


def test_packed():
    batch = collate([A, B], packed=True, pad_id=0)
    assert batch.input_ids_BS.tolist() == [[5, 6, 7, 8, 9, 2]]
    assert batch.labels_BS.tolist() == [[IGNORE, 7, 8, IGNORE, 2, IGNORE]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert (batch.lengths, batch.num_tokens, batch.num_supervised, batch.num_samples, batch.packed) == ((4, 2), 6, 3, 2, True)
    assert {tensor.dtype for tensor in (batch.input_ids_BS, batch.labels_BS, batch.position_ids_BS)} == {torch.int64}


def test_padded_with_pad_equal_to_a_learned_token():
    batch = collate([A, B], packed=False, pad_id=2)
    assert batch.input_ids_BS.tolist() == [[5, 6, 7, 8], [9, 2, 2, 2]]
    assert batch.labels_BS.tolist() == [[IGNORE, 7, 8, IGNORE], [2, IGNORE, IGNORE, IGNORE]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert (batch.lengths, batch.num_tokens, batch.num_supervised, batch.num_samples, batch.packed) == ((4, 2), 6, 3, 2, False)


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_still_is_a_batch_that_counts_for_nothing(packed):
    batch = collate([], packed=packed, pad_id=3)
    assert (batch.input_ids_BS.tolist(), batch.labels_BS.tolist(), batch.position_ids_BS.tolist()) == ([[3]], [[IGNORE]], [[0]])
    assert (batch.lengths, batch.num_tokens, batch.num_supervised, batch.num_samples) == ((1,), 0, 0, 0)


def test_moving_keeps_everything_else():
    batch = collate([A], packed=True, pad_id=0)
    moved = batch.to("meta")
    assert moved.input_ids_BS.device.type == moved.labels_BS.device.type == moved.position_ids_BS.device.type == "meta"
    assert (moved.lengths, moved.num_supervised) == (batch.lengths, batch.num_supervised)
