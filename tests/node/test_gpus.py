"""The GPUs that CUDA shows, as CUDA_VISIBLE_DEVICES selects them from the driver's list."""

from __future__ import annotations

import ctypes

import pytest

from hpc_det.node.gpus import NvmlError, cuda_devices, devices, shown_by_cuda
from tests.facts import refused
from tests.nvml import Nvml, installed

FOUR = Nvml("GPU-a1", "GPU-b2", "GPU-c3", "GPU-d4")
SPLIT = Nvml("GPU-a1", "GPU-b2", mig=("MIG-x", "MIG-y"))
ONLY_SPLIT = Nvml("GPU-a1", mig=("MIG-x", "MIG-y"))


@pytest.mark.parametrize(
    ("nvml", "visible", "shown"),
    [
        (FOUR, None, ["GPU-a1", "GPU-b2", "GPU-c3", "GPU-d4"]),
        (FOUR, "3, 0", ["GPU-d4", "GPU-a1"]),
        (FOUR, "GPU-c,GPU-a1", ["GPU-c3", "GPU-a1"]),
        (FOUR, "0,7,1", ["GPU-a1"]),
        (FOUR, "-1,0", []),
        (FOUR, "NoDevFiles", []),
        (SPLIT, None, ["GPU-b2"]),
        (SPLIT, "MIG-y,MIG-x", ["MIG-y"]),
        (SPLIT, "MIG-GPU-b2/1/0", ["GPU-b2"]),
        (SPLIT, "0,1", ["GPU-b2"]),
        (ONLY_SPLIT, None, ["MIG-x"]),
        (ONLY_SPLIT, "0", ["GPU-a1"]),
    ],
)
def test_cuda_shows_the_devices_that_the_variable_names(nvml: Nvml, visible: str | None, shown: list[str]) -> None:
    assert [device.uuid for device in shown_by_cuda(devices(nvml), visible)] == shown


def test_a_device_has_its_model_memory_and_gpu() -> None:
    gpu, part, _other = devices(ONLY_SPLIT)
    assert (gpu.model, gpu.memory, gpu.part_of, part.part_of) == ("NVIDIA H200", 141 * 2**30, "", "GPU-a1")


@pytest.mark.parametrize("visible", ["", " "])
def test_an_empty_variable_hides_all_gpus_without_a_driver(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": visible}) == []


def test_the_library_of_the_driver_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, FOUR)
    assert len(cuda_devices({})) == 4
    installed(monkeypatch, None)
    assert cuda_devices({}) == []


def test_a_driver_without_a_function_is_an_error() -> None:
    """The C library takes the place of a libnvidia-ml.so.1 that lacks functions."""
    with refused(NvmlError, "nvmlInit_v2", "NVIDIA driver"):
        devices(ctypes.CDLL(None))


def test_a_driver_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Nvml())
    with pytest.raises(NvmlError):
        cuda_devices({})
