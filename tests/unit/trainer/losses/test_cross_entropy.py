"""Both paths against plain cross entropy: sums, counts, gradients, and how many rows of logits exist at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from posttrain_trainer.losses import cross_entropy as subject
from posttrain_trainer.losses.cross_entropy import cross_entropy

V, H = 37, 16


def _inputs(n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, H, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (n,), generator=generator)
    labels[::5] = -100
    head = nn.Linear(H, V, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, H, generator=generator))
    return hidden, labels, head.to(dtype)


def _reference(hidden, labels, head, transform=None):
    logits = head(hidden)
    logits = logits if transform is None else transform(logits)
    loss = functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
    return loss, int(((logits.argmax(-1) == labels) & (labels != -100)).sum()), torch.autograd.grad(loss, [hidden, *head.parameters()])


def _soft_cap(logits):
    return torch.tanh(logits / 3) * 3


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("transform", [None, _soft_cap])
@pytest.mark.parametrize("n", [1, 20, 64])
def test_equals_plain_cross_entropy(n, transform, chunk):
    hidden, labels, head = _inputs(n)
    loss, correct, grads = _reference(hidden, labels, head, transform)
    result = cross_entropy(hidden, labels, head, transform, chunk=chunk)
    assert result.loss_sum.dtype == torch.float32
    assert result.num_correct.dtype == torch.int64
    torch.testing.assert_close(result.loss_sum, loss)
    assert int(result.num_correct) == correct
    scaled = torch.autograd.grad(result.loss_sum * 0.25, [hidden, *head.parameters()])
    for ours, theirs in zip(scaled, grads, strict=True):
        torch.testing.assert_close(ours, theirs * 0.25)


def test_a_head_with_a_bias_takes_the_general_path():
    hidden, labels, _ = _inputs(20)
    head = nn.Linear(H, V)
    loss, correct, grads = _reference(hidden, labels, head)
    result = cross_entropy(hidden, labels, head, chunk=6)
    torch.testing.assert_close(result.loss_sum, loss)
    assert int(result.num_correct) == correct
    for ours, theirs in zip(torch.autograd.grad(result.loss_sum, [hidden, *head.parameters()]), grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bf16_is_near_fp32():
    hidden, labels, head = _inputs(64, torch.bfloat16)
    hidden32, head32 = hidden.detach().float().requires_grad_(), nn.Linear(H, V, bias=False)
    with torch.no_grad():
        head32.weight.copy_(head.weight.float())
    exact = _reference(hidden32, labels, head32)
    result = cross_entropy(hidden, labels, head)
    torch.testing.assert_close(result.loss_sum, exact[0], rtol=1e-2, atol=0)
    grads = torch.autograd.grad(result.loss_sum, [hidden, head.weight])
    assert all(grad.dtype == torch.bfloat16 for grad in grads)
    for ours, theirs in zip(grads, exact[2], strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=5e-2, atol=5e-2)


def test_nothing_supervised_gives_zero_with_zero_gradients():
    hidden, _, head = _inputs(1)
    result = cross_entropy(hidden, torch.tensor([-100]), head)
    assert result.loss_sum.item() == 0
    assert int(result.num_correct) == 0
    for grad in torch.autograd.grad(result.loss_sum, [hidden, head.weight]):
        assert torch.count_nonzero(grad) == 0


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden, labels, head = _inputs(20)
    head.requires_grad_(False)
    result = cross_entropy(hidden, labels, head)
    result.loss_sum.backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_no_more_logits_than_a_chunk_exist_at_a_time(monkeypatch):
    seen = []
    original = subject._chunk

    def watched(hidden_CH, weight_VH, labels_C):
        seen.append(len(labels_C))
        return original(hidden_CH, weight_VH, labels_C)

    monkeypatch.setattr(subject, "_chunk", watched)
    hidden, labels, head = _inputs(1000)
    cross_entropy(hidden, labels, head)
    assert sum(seen) == 1000
    assert max(seen) == subject.CHUNK


def test_without_gradients_none_are_made():
    hidden, labels, head = _inputs(20)
    with torch.no_grad():
        result = cross_entropy(hidden, labels, head)
    torch.testing.assert_close(result.loss_sum, _reference(hidden, labels, head)[0].detach())
    assert not result.loss_sum.requires_grad


def test_a_tie_for_the_likeliest_is_right_on_both_paths_and_what_is_not_counted_is_not():
    head = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    hidden = torch.tensor([[2.0, 0.0]]).expand(4, 2)
    labels = torch.tensor([0, 1, 2, -100])
    assert int(cross_entropy(hidden, labels, head).num_correct) == 2
    assert int(cross_entropy(hidden, labels, head, lambda logits: logits).num_correct) == 2


def test_a_second_backward_pass_is_refused_rather_than_wrong():
    hidden, labels, head = _inputs(20)
    loss = cross_entropy(hidden, labels, head).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given out already"):
        loss.backward()
