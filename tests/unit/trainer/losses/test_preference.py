"""Each preference loss, its gradient and its rewards against numbers worked out by hand; log-probabilities against log-softmax."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain_trainer.contract.methods import DpoMethod
from posttrain_trainer.losses.preference import preference_loss
from posttrain_trainer.losses.sequence import document_logprobs

# Log-ratios of the first pair: chosen 1, rejected -1; of the second: 0 and -1. With beta 0.5: half the margins are 1 and 0.5.
POLICY = ((-1.0, -3.0), (-4.0, -4.0))
REFERENCE = ((-2.0, -2.0), (-4.0, -3.0))
KL = (0.5, 0.0)

# s(1) = 0.7310586, s(0.5) = 0.6224593, s(0.75) = 0.6791787; -log s(1) = 0.3132617, -log s(0.5) = 0.4740770.
BY_HAND = [
    # One sum over both pairs, and the gradient for each log-probability.
    ({"loss_type": "sigmoid"}, 0.3132617 + 0.4740770, ((-0.1344707, 0.1344707), (-0.1887703, 0.1887703))),
    # 0.9 x 0.3132617 + 0.1 x 1.3132617, and 0.9 x 0.4740770 + 0.1 x 0.9740770; gradients -0.5 x (0.9 x (1 - s) - 0.1 x s).
    (
        {"loss_type": "sigmoid", "label_smoothing": 0.1},
        0.4132617 + 0.5240770,
        ((-0.0844707, 0.0844707), (-0.1387703, 0.1387703)),
    ),
    # max(0, 1 - 1) and max(0, 1 - 0.5); the first stands on the kink, where nothing is learned any more.
    ({"loss_type": "hinge"}, 0.0 + 0.5, ((0.0, 0.0), (-0.5, 0.5))),
    # (2 - 1)^2 and (1 - 1)^2.
    ({"loss_type": "ipo"}, 1.0 + 0.0, ((2.0, -2.0), (0.0, 0.0))),
    # Half of (1 - s(0.5 x (1 - 0))) + (1 - s(0.5 x (0.5 + 1))), and of (1 - s(0)) + (1 - s(0.75)).
    ({"loss_type": "kto_pair"}, 0.3491810 + 0.4104107, ((-0.0587509, 0.0544737), (-0.0625, 0.0544737))),
]


@pytest.mark.parametrize(("options", "loss", "gradient"), BY_HAND)
def test_values_by_hand(options, loss, gradient):
    policy = torch.tensor(POLICY, requires_grad=True)
    result = preference_loss(policy, torch.tensor(REFERENCE), DpoMethod(kind="dpo", beta=0.5, **options), torch.tensor(KL))
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(policy.grad, torch.tensor(gradient), atol=1e-6, rtol=0)
    assert int(result.num_correct) == 2
    assert result.extra.tolist() == pytest.approx([0.5, -1.0, 1.5])  # rewards: 0.5 x (1 + 0), 0.5 x (-1 - 1), and their difference


def test_equal_answers_are_at_the_known_start_and_count_as_wrong():
    zeros = torch.zeros(3, 2)
    result = preference_loss(zeros, zeros, DpoMethod(kind="dpo"))
    assert result.loss_sum.item() == pytest.approx(3 * 0.6931472)
    assert int(result.num_correct) == 0


@pytest.mark.parametrize("chunk", [2, 64])
@pytest.mark.parametrize("transform", [None, lambda logits: torch.tanh(logits / 3) * 3])
def test_log_probabilities_of_documents(chunk, transform):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 11, (9,), generator=generator)
    labels[4] = -100
    document = torch.tensor([0, 0, 0, 2, 2, 2, 2, 0, 2])
    head = nn.Linear(8, 11)
    result = document_logprobs(hidden, labels, head, transform, document_N=document, num_documents=3, chunk=chunk)
    logits = head(hidden)
    logprobs = (logits if transform is None else transform(logits)).log_softmax(-1)
    each = torch.stack([logprobs[n, label] if label >= 0 else torch.zeros(()) for n, label in enumerate(labels.tolist())])
    expected = torch.stack([each[[0, 1, 2, 7]].sum(), torch.zeros(()), each[[3, 4, 5, 6, 8]].sum()])
    torch.testing.assert_close(result, expected)
    weights = torch.tensor([1.0, 5.0, -2.0])
    wanted = [hidden, *head.parameters()]
    for ours, theirs in zip(torch.autograd.grad(result @ weights, wanted), torch.autograd.grad(expected @ weights, wanted), strict=True):
        torch.testing.assert_close(ours, theirs)
