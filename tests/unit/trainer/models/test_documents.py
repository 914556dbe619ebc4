"""Packed = padded = each document alone, in loss and gradients; a document never sees the one before it."""

from __future__ import annotations

import numpy
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.data.batch import collate
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models import attention
from posttrain_trainer.models.load import load_model
from posttrain_trainer.models.module import TrainModule, check_documents

LENGTHS = (9, 31, 1, 17)
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": attention.NAME,
}


def _grads(module):
    grads = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        parameter.grad = None
    return grads


def _run(model, batches):
    """Loss sum, correct guesses and gradients of the batches together."""
    loss_sum = correct = 0
    for batch in batches:
        result = model.module(batch, cross_entropy)
        result.loss_sum.backward()
        loss_sum, correct = loss_sum + result.loss_sum.item(), correct + int(result.num_correct)
    return loss_sum, correct, _grads(model.module)


def _same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1] == other[1]
    assert one[2].keys() == other[2].keys()
    for name, grad in one[2].items():
        torch.testing.assert_close(grad, other[2][name], rtol=1e-4, atol=1e-5)


def test_packed_padded_and_alone_are_the_same(arguments, device, world, documents):
    model = load_model(arguments(), device, world)
    samples = documents(*LENGTHS)
    packed = _run(model, [collate(samples, packed=True, pad_id=2)])
    padded = _run(model, [collate(samples, packed=False, pad_id=2)])
    alone = _run(model, [collate([sample], packed=True, pad_id=2) for sample in samples])
    _same(packed, padded)
    _same(packed, alone)
    assert packed[0] > 0
    assert all(torch.count_nonzero(grad) for grad in packed[2].values())


def test_the_same_as_plain_transformers_with_an_attention_mask(tiny, arguments, device, world, documents):
    """The reference is the library's own padded forward with its own mask, cross entropy over the whole logits."""
    samples = documents(*LENGTHS)
    padded = collate(samples, packed=False, pad_id=2)
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    mask = torch.zeros_like(padded.input_ids_BS)
    for row, length in enumerate(padded.lengths):
        mask[row, :length] = 1
    logits = reference(input_ids=padded.input_ids_BS, attention_mask=mask, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), padded.labels_BS.flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    expected = {f"model.{name}": parameter.grad for name, parameter in reference.named_parameters()}
    model = load_model(arguments(), device, world)
    ours = _run(model, [collate(samples, packed=True, pad_id=2)])
    assert ours[0] == pytest.approx(loss.item(), rel=1e-5)
    assert ours[2].keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(ours[2][name], grad, rtol=1e-4, atol=1e-5)


def test_the_second_document_does_not_feel_the_first(arguments, device, world, documents):
    model = load_model(arguments(), device, world)
    model.module.eval()
    first, second, other = documents(13, 20, 13)
    second = (second[0], second[0])  # a label everywhere: logits of all its positions

    def logits(*samples):
        with torch.no_grad():
            return model.module(collate(samples, packed=True, pad_id=2), lambda hidden, _labels, head, _transform: head(hidden))[-20:]

    a, b, alone = logits(first, second), logits(other, second), logits(second)
    assert not numpy.array_equal(first[0], other[0])
    assert torch.equal(a, b)
    torch.testing.assert_close(a, alone, rtol=1e-5, atol=1e-5)


def _varlen_stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What torch says of `varlen_attn`, by masks: no machine without CUDA runs the real one."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    document = torch.bucketize(torch.arange(len(query)), cu_seq_q[1:].long(), right=True)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))[None]
    left, right = (window if window >= 0 else len(query) for window in window_size)
    mask = (document[:, None] == document[None]) & (distance <= left) & (-distance <= right)
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("rows", "lengths"), [(1, LENGTHS), (2, None)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_kernel_for_varying_lengths_is_asked_for_the_same(monkeypatch, rows, lengths, kv_heads, window):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(rows, heads, sum(LENGTHS), 8, generator=generator) for heads in (4, kv_heads, kv_heads))
    given = {"attention_mask": None, "scaling": 0.3, "sliding_window": window, attention.LENGTHS: lengths}
    expected, _ = attention.document_attention(torch.nn.Linear(1, 1), query, key, value, **given)
    monkeypatch.setattr(attention, "_varlen_serves", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_stand_in)
    output, _ = attention.document_attention(torch.nn.Linear(1, 1), query, key, value, **given)
    torch.testing.assert_close(output, expected)


def test_a_batch_without_labels_gives_every_parameter_a_zero_gradient(arguments, device, world):
    model = load_model(arguments(), device, world)
    loss, correct, grads = _run(model, [collate([], packed=True, pad_id=2)])
    assert (loss, correct) == (0, 0)
    assert grads
    assert all(grad is not None and torch.count_nonzero(grad) == 0 for grad in grads.values())


def _module(cls, config, **changes):
    torch.manual_seed(0)
    attention.register()
    return TrainModule(cls(config(**{**SMALL, **changes})))


@pytest.mark.parametrize(
    ("cls", "config", "changes"),
    [
        (MistralForCausalLM, MistralConfig, {"sliding_window": 4}),
        (Qwen3ForCausalLM, Qwen3Config, {}),
        (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
        (Gemma2ForCausalLM, Gemma2Config, {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    ],
)
def test_families_keep_documents_apart_and_logits_their_own(cls, config, changes):
    check_documents(_module(cls, config, **changes))


@pytest.mark.parametrize(
    ("cls", "config", "changes", "sentence"),
    [
        (Gemma2ForCausalLM, Gemma2Config, {}, "needs softcap"),
        (GptOssForCausalLM, GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}, "needs s_aux"),
    ],
)
def test_families_that_attention_cannot_serve_are_refused(cls, config, changes, sentence):
    with pytest.raises(InvalidArguments, match=sentence):
        check_documents(_module(cls, config, **changes))


def test_a_leak_is_seen(monkeypatch):
    """The guard itself: with attention over the whole row, the second document's logits change."""
    module = _module(Qwen3ForCausalLM, Qwen3Config)
    original = attention.document_attention

    def leaking(*args, **kwargs):
        return original(*args, **{**kwargs, attention.LENGTHS: None})

    monkeypatch.setattr(attention, "document_attention", leaking)
    attention.register()
    try:
        with pytest.raises(InvalidArguments, match="leak into each other"):
            check_documents(module)
    finally:
        monkeypatch.undo()
        attention.register()


def test_an_unknown_scaling_of_logits_is_seen():
    module = _module(GraniteForCausalLM, GraniteConfig, logits_scaling=8.0)
    module.transform = None
    with pytest.raises(InvalidArguments, match="other logits"):
        check_documents(module)


def test_the_window_reaches_no_further_back():
    module = _module(MistralForCausalLM, MistralConfig, sliding_window=4, num_hidden_layers=1)
    causal = module.causal.eval()
    ids = torch.arange(20)[None] % 96
    changed = ids.clone()
    changed[0, 10] = 50
    with torch.no_grad():
        before, after = (causal(input_ids=x, use_cache=False, **{attention.LENGTHS: None}).logits[0] for x in (ids, changed))
    moved = (before - after).abs().amax(-1) > 1e-6
    assert moved.nonzero().flatten().tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({}, "does not pass document_lengths"),
        ({attention.LENGTHS: None, "is_causal": False}, "is not causal"),
        ({attention.LENGTHS: None, "attention_mask": torch.ones(1, 1, 3, 3)}, "attention mask"),
    ],
)
def test_what_would_leak_silently_is_an_error(kwargs, sentence):
    tensors = [torch.zeros(1, 2, 3, 4)] * 3
    with pytest.raises(InvalidArguments, match=sentence):
        attention.document_attention(torch.nn.Linear(1, 1), *tensors, **{"attention_mask": None, **kwargs})
