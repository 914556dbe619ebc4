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
