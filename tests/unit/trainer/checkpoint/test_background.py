"""Saving beside training: what is written is what was there when it began, and no failure of it is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file

from posttrain_trainer.checkpoint import background
from posttrain_trainer.checkpoint import save as save_module
from posttrain_trainer.checkpoint.resume import verify
from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.contract.errors import DiskFull
from posttrain_trainer.contract.space import ENV_DISK_RESERVE
from posttrain_trainer.contract.spec import LoraArguments
from posttrain_trainer.device import Device, Memory
from posttrain_trainer.dist import RankFacts, World
from posttrain_trainer.testing import tiny_model

from .test_store import set_up


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=32, heads=2)


@pytest.fixture(scope="module")
def world():
    with World.open(Device.pick("cpu"), facts=RankFacts()) as world:
        yield world


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing that is written is sealed before it is set; it is, at the latest, at the end of the test."""
    opened, seal = threading.Event(), save_module._seal

    def waiting(path, root):
        assert opened.wait(60)
        return seal(path, root)

    monkeypatch.setattr(save_module, "_seal", waiting)
    yield opened
    opened.set()


@pytest.mark.parametrize("lora", [None, LoraArguments(rank=2)], ids=["full", "adapter"])
def test_what_is_written_is_what_was_there_when_it_began(base, tmp_path, world, gate, lora):
    aside, at_once = (set_up(base, tmp_path / name, world, lora=lora, async_save="on") for name in ("aside", "once"))
    progress, same = Progress(), Progress()
    aside.train(2, progress)
    aside.checkpoints.take_room()
    torch.manual_seed(5)
    saving = aside.begin(progress, wait=False)
    torch.manual_seed(6)
    aside.train(3, progress)
    assert not saving.over
    assert aside.run_dir.checkpoint_ids() == []
    gate.set()
    manifest = saving.result()
    assert (saving.waited, saving.failed, manifest.step) == (False, False, 2)
    assert saving.seconds >= saving.blocked_s > 0

    at_once.train(2, same)
    torch.manual_seed(5)
    assert at_once.begin(same, wait=True).waited
    folders = [setup.run_dir.checkpoint(manifest.id) for setup in (aside, at_once)]
    assert verify(folders[0], manifest) is None
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert names[0] == names[1]
    alike = [name for name in names[0] if name not in ("manifest.json", "state/.metadata")]  # times and a random id
    assert len(alike) > 5
    assert [name for name in alike if (folders[0] / name).read_bytes() != (folders[1] / name).read_bytes()] == []


def test_going_on_from_it_is_the_same_as_never_having_stopped(base, tmp_path, world):
    unbroken = set_up(base, tmp_path, world, async_save="on")
    progress = Progress()
    unbroken.train(3, progress)
    saving = unbroken.begin(progress, wait=False)
    unbroken.train(2, progress)
    saving.result()
    resumed = set_up(base, tmp_path, world, async_save="on")
    restored = resumed.checkpoints.load(resumed.checkpoints.choose())
    assert restored == Progress(step=3)
    resumed.train(2, restored)
    first, second = unbroken.weights(), resumed.weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_frozen_weights_of_a_whole_model_are_exported_too(base, tmp_path, world):
    setup = set_up(base, tmp_path, world, async_save="on")
    frozen = next(p for name, p in setup.checkpoints.model.module.named_parameters() if "norm" in name)
    frozen.requires_grad_(False)
    manifest = setup.begin(Progress(step=1), wait=False).result()
    exported = load_file(setup.run_dir.checkpoint(manifest.id) / "model" / "model.safetensors")
    original = load_file(base / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_a_failure_is_told_where_the_result_is_asked_for_and_leaves_nothing(base, tmp_path, world, monkeypatch):
    setup = set_up(base, tmp_path, world, async_save="on")
    setup.begin(Progress(step=1), wait=False).result()

    def full(_path, _root):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(save_module, "_seal", full)
        saving = setup.begin(Progress(step=2), wait=False)
        saving.let_end()
        assert saving.over
        assert saving.failed
        with pytest.raises(OSError, match="No space left"):
            saving.result()
    assert [path.name for path in setup.run_dir.checkpoints.iterdir()] == ["step-000001"]
    assert setup.begin(Progress(step=3), wait=False).result().step == 3


def test_the_newest_and_the_best_stay(base, tmp_path, world):
    setup = set_up(base, tmp_path, world, async_save="on", keep_last=1, keep_best=1, best_metric="loss")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        setup.begin(Progress(step=step), metrics={"loss": loss}, wait=False).result()
    assert setup.run_dir.checkpoint_ids() == ["step-000002", "step-000004"]


@pytest.mark.parametrize(("async_save", "free", "waited"), [("auto", 10**12, False), ("auto", 0, True), ("off", 10**12, True), ("on", 0, False)])
def test_it_is_done_where_asked_for_or_where_there_is_memory(base, tmp_path, world, monkeypatch, async_save, free, waited):
    monkeypatch.setattr(background, "host_memory", lambda: Memory(free, free, 0))
    setup = set_up(base, tmp_path, world, async_save=async_save)
    saving = setup.begin(Progress(step=1), wait=False)
    assert saving.result().step == 1
    assert saving.waited is waited


def test_room_is_taken_once(base, tmp_path, world):
    setup = set_up(base, tmp_path, world, async_save="auto")
    room = setup.checkpoints.room
    assert not room.taken
    setup.train(1, Progress())
    setup.checkpoints.take_room()
    assert room.taken
    setup.begin(Progress(step=1), wait=False).result()
    places = {key: buffer.data_ptr() for key, buffer in room._buffers.items()}
    assert len(places) > 10
    setup.begin(Progress(step=2), wait=False).result()
    assert {key: buffer.data_ptr() for key, buffer in room._buffers.items()} == places


def test_a_checkpoint_without_room_on_the_disk_is_not_begun(base, tmp_path, world, monkeypatch):
    setup = set_up(base, tmp_path, world, async_save="on")
    monkeypatch.setenv(ENV_DISK_RESERVE, str(2**62))
    with pytest.raises(DiskFull, match="must stay free"):
        setup.begin(Progress(step=1), wait=False)
    assert list(setup.run_dir.checkpoints.iterdir()) == []
