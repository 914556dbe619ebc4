"""A step's loss and gradient are those of its tokens, however they fall into micro-batches."""

from __future__ import annotations

import pytest
import torch

from posttrain_trainer.data.batch import collate
from posttrain_trainer.losses.cross_entropy import cross_entropy
from posttrain_trainer.models.load import load_model
from posttrain_trainer.testing import whole


@pytest.fixture
def step(arguments, device, world):
    """Loss and gradients of one step over these micro-batches, as the loop makes them."""
    model = load_model(arguments(), device, world)

    def take(*groups):
        micro = [collate(group, packed=True, pad_id=2) for group in groups]
        supervised, loss = sum(batch.num_supervised for batch in micro), 0.0
        for number, batch in enumerate(micro):
            model.set_sync(number == len(micro) - 1)
            result = model.module(batch, cross_entropy)
            (result.loss_sum / supervised).backward()
            loss += result.loss_sum.item() / supervised
        gradients = {name: whole(p.grad).clone() for name, p in model.module.named_parameters()}
        model.module.zero_grad()
        return loss, gradients, torch.nn.utils.get_total_norm(list(gradients.values())).item()

    return take


def test_ten_labels_and_a_thousand_weigh_alike_in_one_micro_batch_or_two(step, documents):
    few, many = documents(20, 2000)
    assert [int((labels >= 0).sum()) for _, labels in (few, many)] == [9, 999]
    loss, gradients, norm = step([few, many])
    other_loss, other_gradients, other_norm = step([few], [many])
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert other_norm == pytest.approx(norm, rel=1e-5)
    assert all(torch.allclose(other_gradients[name], gradients[name], atol=1e-6) for name in gradients)
    mean_of_means = sum(step([group])[0] for group in (few, many)) / 2
    assert abs(mean_of_means - loss) > 1e-3, "the test could not tell the wrong mean from the right one"


def test_accumulating_four_micro_batches_divides_by_nothing_twice(step, documents):
    four = documents(31, 12, 47, 25)
    loss, _, norm = step(four)
    other_loss, _, other_norm = step(*[[one] for one in four])
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert other_norm == pytest.approx(norm, rel=1e-5)
