"""A stand-in for NVIDIA's library NVML, as ctypes calls it."""

from __future__ import annotations

from typing import Any

import pytest


class Nvml:
    """A stand-in for NVML. A device is a UUID, or None if it belongs to another job; `mig`: parts of the first one."""

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

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = 141 * 2**30
        memory._obj.used = int(memory._obj.total * self._used.get(str(self._all[handle.value - 1]), 0))
        return 0


def installed(patch: pytest.MonkeyPatch, library: Nvml | None) -> None:
    """Make it the library of this machine's driver, whose GPUs are all visible; None: there is no driver."""

    def load(name: str) -> Nvml:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    patch.setattr("hpc_det.node.gpus.ctypes.CDLL", load)
    for module in ("hpc_det.config.local_slots", "hpc_det.schedulers.site"):
        patch.setattr(f"{module}.torch_has_cuda", lambda: True)  # the torch of the tests may be a build for CPUs
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
