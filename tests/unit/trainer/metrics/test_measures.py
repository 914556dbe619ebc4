"""MFU, the split of a step's time, and the profiler's window."""

import json

import pytest
import torch

from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.device import Device
from posttrain_trainer.metrics.meter import Stopwatch, device_marks
from posttrain_trainer.metrics.mfu import Mfu, Peak, flops_per_token, known_peak, peak_of
from posttrain_trainer.metrics.profile import ProfileWindow


@pytest.mark.parametrize(
    ("total", "trainable", "looked_up", "flops"),
    [
        (1000, 1000, 0, 6000),  # tied: the embedding is the head, and multiplied there
        (1000, 1000, 300, 6 * 700),
        (1100, 100, 0, 6 * 100 + 4 * 1000),  # an adapter beside frozen weights
        (1100, 100, 300, 6 * 100 + 4 * 700),
    ],
)
def test_flops_of_a_token(total, trainable, looked_up, flops):
    assert flops_per_token(total, trainable, looked_up) == flops


def test_share_of_the_peak():
    mfu = Mfu(6000.0, Peak(1e6, "told"), ranks=2)
    assert mfu.share(num_tokens=100, seconds=0.5) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A1000", None),
    ],
)
def test_table_of_gpus(name, tflops):
    assert known_peak(name) == (None if tflops is None else tflops * 1e12)


def test_the_peak_of_a_cpu_is_measured_without_drawing_random_numbers():
    torch.set_num_threads(1)
    before = torch.get_rng_state()
    peak = peak_of(Device.pick("cpu"), torch.float32)
    assert 1e8 < peak.flops_per_s < 1e14
    assert "float32 matmuls of 512 x 512" in peak.source
    assert torch.equal(before, torch.get_rng_state())


class Mark:
    clock = 0.0

    def record(self) -> None:
        Mark.clock += 250.0
        self.at = Mark.clock

    def elapsed_time(self, end: "Mark") -> float:
        return end.at - self.at


def test_a_device_tells_the_parts_itself():
    watch = Stopwatch(in_step_with_host=False, mark=Mark)
    for name in ("data", "forward", "backward", "forward"):
        with watch.part(name):
            pass
    parts = watch.parts()
    assert parts["forward"] == 0.5
    assert parts["backward"] == 0.25
    assert 0 <= parts["data"] < 0.1, "made by the host"
    assert (device_marks("cpu"), device_marks("mps")) == (None, None)


def window(steps, path, told, warned):
    return ProfileWindow(steps, path, Device.pick("cpu"), tell=lambda text, where: told.append(text), warn=warned.append)


def run(profile, steps):
    for number in range(1, steps + 1):
        with profile.step(number):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profile.close(steps)


def matmuls(path):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "aten::mm"]


def test_the_profile_holds_the_steps_of_its_window(tmp_path):
    path, told, warned = tmp_path / "profile" / "rank-0.json", [], []
    run(window((2, 3), path, told, warned), 5)
    assert len(matmuls(path)) == 2
    assert (len(told), warned) == (1, [])


def test_a_run_that_ends_early_keeps_what_was_recorded(tmp_path):
    path, told, warned = tmp_path / "rank-0.json", [], []
    run(window((2, 9), path, told, warned), 3)
    assert len(matmuls(path)) == 2
    run(window((4, 9), tmp_path / "none.json", told, warned), 3)
    assert not (tmp_path / "none.json").exists()
    assert ["nothing was profiled" in text for text in warned] == [True]


def test_a_profile_that_cannot_be_written_does_not_stop_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    told, warned = [], []
    run(window((1, 1), tmp_path / "file" / "rank-0.json", told, warned), 2)
    assert told == []
    assert len(warned) == 1


def test_a_window_has_an_order():
    base = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}
    with pytest.raises(ValueError, match="before it begins"):
        FullTrainingArguments(**base, profile_steps=(3, 2))
    one, other = FullTrainingArguments(**base), FullTrainingArguments(**base, profile_steps=(1, 2))
    assert one.digest() == other.digest(), "a run may be profiled after it was resumed"
