"""Who decays, and which optimizer is built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.optim.groups import build_optimizer, parameter_groups


class _Net(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def _names(net, group):
    ids = {id(p) for p in group["params"]}
    return {name for name, p in net.named_parameters() if id(p) in ids}


@pytest.mark.parametrize(("tied", "decayed"), [(True, {"linear.weight"}), (False, {"linear.weight", "head.weight"})])
def test_matrices_decay_and_the_rest_does_not(tied, decayed):
    net = _Net(tied=tied)
    decay, rest = parameter_groups(net, 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert _names(net, decay) == decayed
    assert _names(net, rest) == {"embed.weight", "norm.weight", "norm.bias", "linear.bias"}


def _args(**changes):
    return FullTrainingArguments(model_path="m", data_path="d", ckpt_output_dir="o", **changes)


@pytest.mark.parametrize(("name", "cls"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)])
def test_each_optimizer_takes_its_values_and_steps(name, cls):
    net = _Net(tied=True)
    optimizer = build_optimizer(_args(optimizer=name, learning_rate=0.1, weight_decay=0.2, adamw_betas=(0.8, 0.7), adamw_eps=1e-3), net)
    assert type(optimizer) is cls
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.2)
    if name != "sgd":
        assert (group["betas"], group["eps"]) == ((0.8, 0.7), 1e-3)
    frozen, before = net.frozen.weight.clone(), net.linear.weight.clone()
    net.linear(net.norm(net.embed(torch.arange(5)))).pow(2).sum().backward()
    optimizer.step()
    assert torch.equal(net.frozen.weight, frozen)
    assert not torch.equal(net.linear.weight, before)


def test_sgd_is_plain():
    net = nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(_args(optimizer="sgd", learning_rate=0.5), net)
    before = net.weight.detach().clone()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net.weight.detach(), before - 0.5)
