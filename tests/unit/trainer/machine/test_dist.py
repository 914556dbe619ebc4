"""The world of one; several ranks are in models/test_ranks.py."""

from __future__ import annotations

import pytest
from torch import distributed

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.device import Device
from posttrain_trainer.dist import RankFacts, World


def test_a_world_of_one_reduces_and_ends():
    with World.open(Device.pick("cpu"), facts=RankFacts()) as world:
        assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
        assert world.sum([1.5, 2**53 + 2.0]) == [1.5, 2**53 + 2.0]
        assert world.any(True)
        assert not world.any(False)
        assert world.broadcast({"a": [1, "ü", None], "b": (1, 2)}) == {"a": [1, "ü", None], "b": [1, 2]}
        world.barrier()
        assert world.mesh().shape == (1,)
        assert world.mesh(1).shape == (1, 1)
        assert world.mesh() is world.mesh()
    assert not distributed.is_initialized()


def test_the_group_ends_with_an_error():
    with pytest.raises(KeyError), World.open(Device.pick("cpu"), facts=RankFacts()):
        raise KeyError("x")
    assert not distributed.is_initialized()


def test_facts_from_the_environment():
    assert RankFacts.from_environment({}) == RankFacts(0, 0, 1, 1)
    whole = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "HOME": "/"}
    assert RankFacts.from_environment(whole) == RankFacts(5, 1, 8, 4)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "0"}, "not LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE"),
        ({"RANK": "x", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "no number"),
    ],
)
def test_half_an_environment_is_refused(environment, sentence):
    with pytest.raises(InvalidArguments, match=sentence):
        RankFacts.from_environment(environment)
