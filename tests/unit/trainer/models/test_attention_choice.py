"""Which kernel attends: the one that was asked for, or a refusal by name."""

from __future__ import annotations

import pytest
import torch

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.device import Device
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models import attention
from posttrain_trainer.models.load import load_model


@pytest.fixture
def one_kernel_for_all(monkeypatch):
    """As if this device had the kernel for documents of varying lengths; how often it was called."""
    called = []

    def varlen(query, key, value, lengths, scaling, window):
        called.append(lengths)
        return attention.document_attention(torch.nn.Module(), query, key, value, None, scaling, kernel="sdpa", sliding_window=window, document_lengths=lengths)[0]

    monkeypatch.setattr(attention, "_varlen_serves", lambda _query, _dropout: True)
    monkeypatch.setattr(attention, "_varlen", varlen)
    return called


@pytest.mark.parametrize(("kernel", "calls"), [("auto", 2), ("sdpa", 0)])
def test_the_kernel_is_the_one_asked_for(arguments, device, world, batch, one_kernel_for_all, kernel, calls):
    model = load_model(arguments(attention=kernel), device, world)
    one_kernel_for_all.clear()  # loading proves that documents are kept apart
    model.module(batch(12, 20), cross_entropy)
    assert one_kernel_for_all == [(12, 20)] * calls  # once in each layer


def test_flash_by_name_is_that_kernel_and_nothing_else(arguments, device, world, batch, one_kernel_for_all, monkeypatch):
    model = load_model(arguments(), device, world)
    gpu = Device("cuda", 0, "cpu:gloo,cuda:nccl", True, 1)
    attention.choose(model.module.causal, "flash", gpu, torch.bfloat16)
    one_kernel_for_all.clear()
    model.module(batch(12, 20), cross_entropy)
    assert one_kernel_for_all == [(12, 20)] * 2
    monkeypatch.setattr(attention, "_varlen_serves", lambda _query, _dropout: False)
    with pytest.raises(InvalidArguments, match="attention flash cannot serve LlamaAttention"):
        model.module(batch(12, 20), cross_entropy)
    with pytest.raises(InvalidArguments, match="not in float32"):
        attention.choose(model.module.causal, "flash", gpu, torch.float32)


def test_flash_is_refused_where_there_is_none(arguments, device, world):
    with pytest.raises(InvalidArguments, match="attention flash needs a CUDA device, and this run is on cpu; use auto or sdpa"):
        load_model(arguments(attention="flash"), device, world)
