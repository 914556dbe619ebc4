"""Saving, verifying and restoring a real (tiny) model in a world of one rank."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain_trainer.checkpoint import save as save_module
from posttrain_trainer.checkpoint.resume import choose, read_manifest, verify
from posttrain_trainer.checkpoint.state import Progress
from posttrain_trainer.checkpoint.store import Checkpoints
from posttrain_trainer.contract.errors import CheckpointInvalid, DiskFull, InvalidArguments
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.space import ENV_DISK_RESERVE
from posttrain_trainer.contract.spec import FullTrainingArguments, LoraArguments
from posttrain_trainer.device import Device
from posttrain_trainer.dist import RankFacts, World
from posttrain_trainer.models.load import load_model
from posttrain_trainer.optim.groups import build_optimizer
from posttrain_trainer.testing import tiny_model, whole

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=32, heads=2)


@pytest.fixture(scope="module")
def world():
    with World.open(Device.pick("cpu"), facts=RankFacts()) as world:
        yield world


@dataclass
class Setup:
    run_dir: RunDir
    checkpoints: Checkpoints
    told: list[str]

    def train(self, steps: int, progress: Progress) -> None:
        """Optimizer steps with made-up gradients: what matters here is that moments and weights move."""
        parameters = [p for group in self.checkpoints.optimizer.param_groups for p in group["params"]]
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter) * (1 + progress.step)
            self.checkpoints.optimizer.step()
            self.checkpoints.optimizer.zero_grad()
            progress.step += 1

    def save(self, progress: Progress, **options):
        return self.begin(progress, **options).result()

    def begin(self, progress: Progress, **options):
        return self.checkpoints.save(progress, options.pop("trigger", "steps"), options.pop("metrics", {}), **options)

    def weights(self) -> dict[str, torch.Tensor]:
        module = self.checkpoints.model.module
        return {name: whole(tensor).clone() for name, tensor in module.state_dict().items()}


def set_up(base: Path, folder: Path, world: World, *, attempt: int = 1, **knobs) -> Setup:
    args = FullTrainingArguments(model_path=str(base), data_path="unused", ckpt_output_dir=str(folder), dtype="fp32", **knobs)
    model = load_model(args, world.device, world)
    told: list[str] = []
    optimizer = build_optimizer(args, model.module)
    checkpoints = Checkpoints(RunDir(folder), attempt, args, str(base), world, model, optimizer, told.append)
    checkpoints.prepare()
    return Setup(RunDir(folder), checkpoints, told)


@pytest.mark.parametrize("lora", [None, LoraArguments(rank=2)], ids=["full", "adapter"])
def test_going_on_from_a_checkpoint_is_the_same_as_never_having_stopped(base, tmp_path, world, lora):
    unbroken = set_up(base, tmp_path / "a", world, lora=lora)
    progress = Progress()
    unbroken.train(3, progress)
    unbroken.save(progress)
    rng = torch.get_rng_state()
    unbroken.train(2, progress)

    resumed = set_up(base, tmp_path / "a", world, lora=lora)
    manifest = resumed.checkpoints.choose()
    torch.manual_seed(123)
    restored = resumed.checkpoints.load(manifest)
    assert restored == Progress(step=3)
    assert torch.equal(torch.get_rng_state(), rng)
    resumed.train(2, restored)
    first, second = unbroken.weights(), resumed.weights()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert resumed.told == []


def test_loading_leaves_the_learning_rate_and_untouched_moments_alone(base, tmp_path, world):
    saved = set_up(base, tmp_path, world, learning_rate=0.5)
    saved.save(Progress())  # before the first step there are no moments
    loaded = set_up(base, tmp_path, world, learning_rate=0.5)
    loaded.checkpoints.load(loaded.checkpoints.choose())
    assert {group["lr"] for group in loaded.checkpoints.optimizer.param_groups} == {0.5}
    assert len(loaded.checkpoints.optimizer.state) == 0


def test_a_whole_model_loads_with_plain_transformers(base, tmp_path, world):
    setup = set_up(base, tmp_path, world)
    progress = Progress()
    setup.train(1, progress)
    setup.save(progress)
    folder = setup.run_dir.checkpoint("step-000001") / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = setup.weights()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[f"model.{name}"]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    config, original = json.loads((folder / "config.json").read_text()), json.loads((base / "config.json").read_text())
    assert config == original
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == model.config.eos_token_id
    tokenizer, before = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(base)
    assert tokenizer.chat_template == before.chat_template
    assert tokenizer("seven apples")["input_ids"] == before("seven apples")["input_ids"]


def test_the_export_is_written_in_the_precision_of_the_computation(base, tmp_path, world):
    setup = set_up(base, tmp_path, world)
    object.__setattr__(setup.checkpoints.model, "dtype", torch.bfloat16)
    setup.save(Progress(step=1))
    folder = setup.run_dir.checkpoint("step-000001") / "model"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads an attribute by its old name
def test_a_merged_model_equals_base_and_adapter(base, tmp_path, world):
    from peft import PeftModel

    setup = set_up(base, tmp_path, world, lora=LoraArguments(rank=2, alpha=4), learning_rate=0.05)
    progress = Progress()
    setup.train(3, progress)
    setup.save(progress, merge=True)
    folder = setup.run_dir.checkpoint("step-000003")
    ids = torch.arange(10)[None]
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        before = plain(ids).logits
        adapted = PeftModel.from_pretrained(plain, folder / "model")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")(ids).logits
    assert (adapted - merged).abs().max() < 1e-3
    assert (before - merged).abs().max() > 1e-2
    assert json.loads((folder / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert AutoTokenizer.from_pretrained(folder / "merged").chat_template is not None


def test_the_manifest_lists_every_file_and_nothing_temporary_is_left(base, tmp_path, world):
    setup = set_up(base, tmp_path, world)
    manifest = setup.save(Progress(step=4, samples_seen=9), trigger="epoch", metrics={"loss": 1.5})
    folder = setup.run_dir.checkpoint("step-000004")
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {file.path for file in manifest.files} == on_disk - {"manifest.json"}
    assert read_manifest(folder) == manifest
    assert verify(folder, manifest) is None
    assert (manifest.trigger, manifest.samples_seen, manifest.metrics, manifest.kind) == ("epoch", 9, {"loss": 1.5}, "full")
    assert [path.name for path in setup.run_dir.checkpoints.iterdir()] == ["step-000004"]


def test_keep_last_removes_the_older_ones(base, tmp_path, world):
    setup = set_up(base, tmp_path, world, keep_last=2)
    for step in (1, 2, 3):
        setup.save(Progress(step=step))
    assert setup.run_dir.checkpoint_ids() == ["step-000002", "step-000003"]


def test_a_failed_write_leaves_nothing_and_earlier_checkpoints_stay(base, tmp_path, world, monkeypatch):
    setup = set_up(base, tmp_path, world)
    setup.save(Progress(step=1))

    def full(_path, _root):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "_seal", full)
    with pytest.raises(OSError, match="No space left"):
        setup.save(Progress(step=2))
    assert [path.name for path in setup.run_dir.checkpoints.iterdir()] == ["step-000001"]


def test_what_an_interrupted_write_left_is_swept(base, tmp_path, world):
    for name in (".tmp-step-000009-1", ".trash-step-000001"):
        (tmp_path / "checkpoints" / name / "model").mkdir(parents=True)
    setup = set_up(base, tmp_path, world)
    assert list(setup.run_dir.checkpoints.iterdir()) == []


@pytest.fixture(scope="module")
def two_checkpoints(base, tmp_path_factory, world) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("run")
    setup = set_up(base, folder, world)
    for step in (1, 2):
        setup.save(Progress(step=step))
    return folder, setup.checkpoints.args.digest()


@pytest.fixture
def run(two_checkpoints, tmp_path) -> tuple[RunDir, str]:
    shutil.copytree(two_checkpoints[0], tmp_path / "run")
    return RunDir(tmp_path / "run"), two_checkpoints[1]


def truncate(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def alter(folder: Path) -> None:
    path = folder / "state" / ".metadata"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def outside(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("model/config.json", "../../secret"))


def link(folder: Path) -> None:
    elsewhere = folder.parent.parent / "elsewhere"
    shutil.move(folder / "model", elsewhere)
    (folder / "model").symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "bytes instead of"),
        (alter, "was altered"),
        (lambda folder: (folder / "state" / "progress.json").unlink(), "is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "incomplete"),
        (lambda folder: (folder / "manifest.json").write_text('{"id": "step-0'), "cannot be read"),
        (outside, "outside of it"),
        (link, "symbolic link"),
    ],
    ids=["truncated", "altered", "file-missing", "no-manifest", "torn-manifest", "outside", "link"],
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_never_read(run, damage, says):
    run_dir, digest = run
    damage(run_dir.checkpoint("step-000002"))
    choice = choose(run_dir, "auto", digest)
    assert choice.manifest.id == "step-000001"
    assert len(choice.passed_over) == 1
    assert says in choice.passed_over[0]
    with pytest.raises(CheckpointInvalid, match=says):
        choose(run_dir, "step-000002", digest)


def test_the_choice(run):
    run_dir, digest = run
    assert choose(run_dir, "auto", digest).manifest.id == "step-000002"
    assert choose(run_dir, "step-000001", digest).manifest.id == "step-000001"
    assert choose(run_dir, "never", digest).manifest is None
    with pytest.raises(CheckpointInvalid, match=r"no checkpoint step-000007.*step-000001, step-000002"):
        choose(run_dir, "step-000007", digest)


def test_checkpoints_of_other_arguments_are_not_mixed_in(run):
    run_dir, _ = run
    with pytest.raises(InvalidArguments, match=r"other arguments.*resume: never"):
        choose(run_dir, "auto", "another")
    with pytest.raises(CheckpointInvalid, match="other arguments"):
        choose(run_dir, "step-000001", "another")


def test_an_empty_run_starts_anew(tmp_path):
    assert choose(RunDir(tmp_path), "auto", "d").manifest is None


def test_a_checkpoint_of_another_shape_is_refused(base, tmp_path, world):
    other = tiny_model(tmp_path / "wide", hidden=64)
    small = set_up(base, tmp_path / "run", world)
    small.save(Progress(step=1))
    wide = set_up(other, tmp_path / "run", world)
    with pytest.raises(CheckpointInvalid, match="has shape"):
        wide.checkpoints.load(wide.checkpoints.choose())


@pytest.mark.parametrize(("lora", "merge"), [(None, False), (LoraArguments(rank=2), False), (LoraArguments(rank=2), True)])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(base, tmp_path, world, lora, merge):
    setup = set_up(base, tmp_path, world, lora=lora)
    progress = Progress()
    setup.train(1, progress)
    said = setup.checkpoints.size_bytes(merge=merge)
    manifest = setup.save(progress, merge=merge)
    tensors = sum(f.size_bytes for f in manifest.files if f.path.endswith((".safetensors", ".distcp")))
    assert said <= tensors <= said * 1.2 + 400_000  # headers, and tensors that are stored in two places


def test_a_checkpoint_that_would_eat_into_the_reserve_is_not_begun(base, tmp_path, world, monkeypatch):
    setup = set_up(base, tmp_path, world)
    setup.save(Progress(step=1))
    monkeypatch.setenv(ENV_DISK_RESERVE, str(shutil.disk_usage(tmp_path).free + 2**40))
    with pytest.raises(DiskFull, match="must stay free; free some space, then resume"):
        setup.save(Progress(step=2))
    assert [path.name for path in setup.run_dir.checkpoints.iterdir()] == ["step-000001"]
    with pytest.raises(DiskFull):  # and nothing is trained that can't be saved
        set_up(base, tmp_path, world, attempt=2)
    monkeypatch.delenv(ENV_DISK_RESERVE)
    setup.save(Progress(step=2))
