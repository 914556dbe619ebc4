"""A tiny model, batches of it, and a world of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.batch import Batch, collate
from posttrain_trainer.device import Device
from posttrain_trainer.dist import RankFacts, World
from posttrain_trainer.testing import tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tied embeddings; shared, so not to be written to."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def device() -> Device:
    return Device.pick("cpu")


@pytest.fixture
def world(device: Device) -> Iterator[World]:
    with World.open(device, facts=RankFacts()) as opened:
        yield opened


@pytest.fixture
def arguments(tiny: Path) -> Callable[..., FullTrainingArguments]:
    def make(**changes: Any) -> FullTrainingArguments:
        values = {"model_path": str(tiny), "data_path": "d", "ckpt_output_dir": "o", "dtype": "fp32", **changes}
        return FullTrainingArguments(**values)

    return make


@pytest.fixture
def documents() -> Callable[..., list[Any]]:
    """Samples of these lengths, labels on the second half of each."""

    def make(*lengths: int) -> list[Any]:
        generator = numpy.random.default_rng(5)
        samples = []
        for length in lengths:
            ids = generator.integers(4, 400, length, dtype=numpy.int32)
            labels = numpy.append(ids[1:], -100).astype(numpy.int32)
            labels[: length // 2] = -100
            samples.append((ids, labels))
        return samples

    return make


@pytest.fixture
def batch(documents: Callable[..., list[Any]]) -> Callable[..., Batch]:
    def make(*lengths: int, packed: bool = True) -> Batch:
        return collate(documents(*lengths), packed=packed, pad_id=2)

    return make
