"""What the NVIDIA driver's library answers, by a stand-in that fills the same structures."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hpc_det.launch.watch.gpus import device_problem


class Nvml:
    """Each device is a UUID, or None for another job's; `mig` are parts of the first one."""

    def __init__(self, *uuids: str | None, mig: tuple[str, ...] = (), used: dict[str, float] | None = None) -> None:
        self._uuids = uuids
        self._mig = mig
        self._all = [*uuids, *mig]
        self._used = used or {}

    def nvmlInit_v2(self) -> int:
        return 0 if self._uuids else 9  # NVML_ERROR_DRIVER_NOT_LOADED

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._uuids)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0 if self._uuids[index.value] else 4  # NVML_ERROR_NO_PERMISSION

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Any, count: Any) -> int:
        count._obj.value = len(self._mig) if gpu.value == 1 else 0
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Any, index: Any, handle: Any) -> int:
        handle._obj.value = len(self._uuids) + index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        buffer.value = str(self._all[handle.value - 1]).encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = 100
        memory._obj.used = int(100 * self._used.get(str(self._all[handle.value - 1]), 0))
        return 0


FOUR = Nvml("GPU-a", "GPU-b", "GPU-c", "GPU-d")
PARTS = Nvml("GPU-a", mig=("MIG-x", "MIG-y"))


@pytest.mark.parametrize(
    ("nvml", "visible"),
    [
        (FOUR, None),
        (FOUR, "2,3"),
        (FOUR, "GPU-d,GPU-a"),
        (PARTS, "MIG-x,MIG-y"),
        (Nvml("GPU-a1b2", "GPU-c3"), "GPU-a1,GPU-c"),
        (Nvml("GPU-a", "GPU-b", "GPU-c", used={"GPU-a": 0.9}), "1,2"),
    ],
    ids=["all", "numbers", "UUIDs", "parts of a GPU", "beginnings of UUIDs", "another one is in use"],
)
def test_two_ranks_have_a_gpu_each(nvml: Nvml, visible: str | None) -> None:
    assert device_problem(2, {"CUDA_VISIBLE_DEVICES": visible} if visible else {}, nvml) is None


@pytest.mark.parametrize(
    ("nvml", "visible", "problem"),
    [
        (Nvml("GPU-a", None), None, "1 of 2 GPUs"),
        (FOUR, "", "0 of 2 GPUs (CUDA_VISIBLE_DEVICES is '')"),
        (FOUR, "0,7", "no such GPU: 7 (CUDA_VISIBLE_DEVICES is '0,7')"),
        (FOUR, "GPU-a,GPU-z", "no such GPU: GPU-z (CUDA_VISIBLE_DEVICES is 'GPU-a,GPU-z')"),
        (Nvml("GPU-a", "GPU-b", used={"GPU-b": 0.9}), None, "somebody holds most of the memory of GPU-b (90%)"),
    ],
    ids=["one is another job's", "none is shown", "a number too high", "an unknown UUID", "one is in use"],
)
def test_a_gpu_that_is_missing_or_taken_is_named(nvml: Nvml, visible: str | None, problem: str) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert device_problem(2, env, nvml) == problem


def test_a_driver_that_does_not_answer_is_a_problem() -> None:
    problem = device_problem(1, {}, Nvml())
    assert problem == "the NVIDIA driver does not answer (nvmlInit_v2 returned 9); see what nvidia-smi says there"


def test_a_node_without_the_drivers_library_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert device_problem(8, {}) is None
