"""Slots of this machine."""

import pynvml
import pytest

from posttrain_service.work import inventory


@pytest.mark.parametrize(
    ("setting", "seen"),
    [(None, [0, 1, 2, 3]), ("", []), ("2,0", [2, 0]), ("-1", []), ("1,9,2", [1]), (" 3 ", [3])],
)
def test_visible(setting, seen):
    assert inventory.visible(4, setting) == seen


def test_devices_named_by_uuid_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="device numbers"):
        inventory.visible(4, "GPU-5e1c")


def test_without_a_driver_there_are_cpu_slots(monkeypatch):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert inventory.devices(2) == ["cpu:0", "cpu:1"]


def test_with_a_driver_there_are_its_devices(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert inventory.devices(7) == ["gpu:0", "gpu:1"]


def kfd(tmp_path, *simd_counts):
    for number, count in enumerate(simd_counts):
        node = tmp_path / str(number)
        node.mkdir()
        (node / "properties").write_text(f"cpu_cores_count {0 if count else 64}\nsimd_count {count}\nmem_banks_count 1\n")
    (tmp_path / "99").mkdir()  # a node whose properties this container may not read
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, ["rocm:0", "rocm:1", "rocm:2"]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["rocm:2", "rocm:0"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, ["rocm:0", "rocm:1"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["rocm:1"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["rocm:1"]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, ["cpu:0"]),
    ],
)
def test_amd_devices_are_counted_by_the_kernel_and_named_as_hip_numbers_them(monkeypatch, tmp_path, environ, seen):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.setattr(inventory, "_KFD_NODES", kfd(tmp_path, 0, 304, 0, 304, 304))
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert inventory.devices(1) == seen
