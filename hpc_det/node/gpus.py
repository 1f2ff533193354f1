"""The NVIDIA GPUs of this machine, as its driver's library (NVML, nvml.h of the CUDA toolkit) lists them.

The library is used directly, because nvidia-smi takes ten times longer, and compute nodes run the standard library
only. NVML lists only the devices of the job's cgroup or container.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIBRARY = "libnvidia-ml.so.1"
_UUID_LENGTH = _NAME_LENGTH = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE, NVML_DEVICE_NAME_V2_BUFFER_SIZE


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlError(Exception):
    """The driver does not answer, or is too old: a function of NVML is missing or has returned an error."""


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG device."""

    uuid: str
    """GPU-... or MIG-..."""
    used: float
    """Share of its memory, from 0 to 1."""
    memory: int = 0
    """Size of its memory in bytes; 0 if it is not reported."""
    model: str = ""
    part_of: str = ""
    """UUID of the GPU that a MIG device is a part of; empty for a GPU."""


def devices(nvml: Any | None = None) -> list[Device]:
    """Return the GPUs in the driver's order, each followed by its MIG devices.

    `nvml`: the library; None: load it. Raises OSError if there is no NVIDIA driver, NvmlError if it does not answer.
    """
    nvml = nvml or ctypes.CDLL(_LIBRARY)
    try:
        _call(nvml.nvmlInit_v2)
        try:
            return list(_devices(nvml))
        finally:
            nvml.nvmlShutdown()
    except AttributeError as error:  # ctypes' error for a function that the library of an old driver lacks
        raise NvmlError(f"the NVIDIA driver is too old ({error}); update it") from None


def cuda_devices(env: Mapping[str, str]) -> list[Device]:
    """Return the GPUs that CUDA shows to a process with this environment; an empty list without an NVIDIA driver.

    Raises NvmlError if the driver does not answer.
    """
    visible = env.get(VISIBLE)
    if visible is not None and not visible.strip():
        return []
    try:
        return shown_by_cuda(devices(), visible)
    except OSError:
        return []


def shown_by_cuda(found: Sequence[Device], visible: str | None) -> list[Device]:
    """Return those of the devices that CUDA shows, given CUDA_VISIBLE_DEVICES.

    CUDA ignores the list from the first unknown name on (CUDA C++ Programming Guide, environment variables), and shows
    a process either whole GPUs or one MIG device (MIG User Guide, CUDA device enumeration).
    """
    split = {device.part_of for device in found}
    mine = [device for device in found if device.uuid not in split]
    if visible is not None:
        mine = []
        for name in names(visible):
            if (device := named(found, name)) is None:
                break
            mine.append(device)
    whole = [device for device in mine if not device.part_of and device.uuid not in split]
    return whole or mine[:1]


def names(visible: str) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES: numbers, or beginnings of UUIDs."""
    return [name for part in visible.split(",") if (name := part.strip())]


def named(found: Sequence[Device], name: str) -> Device | None:
    """Return the device that a name in CUDA_VISIBLE_DEVICES means; None if there is none."""
    if name.isdecimal():
        gpus = [device for device in found if not device.part_of]
        return gpus[int(name)] if int(name) < len(gpus) else None
    # Drivers before 470 wrote MIG-GPU-UUID/INSTANCE/INSTANCE for a MIG device, which NVML now lists under its GPU.
    plain = name.split("/")[0].removeprefix("MIG-") if name.startswith("MIG-GPU-") else name
    return next((device for device in found if device.uuid.startswith(plain)), None)


def _devices(nvml: Any) -> Iterator[Device]:
    for handle in _handles(nvml):
        gpu = _device(nvml, handle)
        yield gpu
        yield from (_device(nvml, part, gpu.uuid) for part in _mig_handles(nvml, handle))


def _handles(nvml: Any) -> Iterator[ctypes.c_void_p]:
    """Yield the handles of the GPUs that this job may use."""
    count = ctypes.c_uint()
    _call(nvml.nvmlDeviceGetCount_v2, ctypes.byref(count))
    for index in range(count.value):
        handle = ctypes.c_void_p()
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        if code == 0:  # otherwise NVML_ERROR_NO_PERMISSION: the GPU belongs to another job
            yield handle


def _mig_handles(nvml: Any, gpu: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    """Yield the handles of the MIG devices of a GPU."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(count)):
        return
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            yield handle


def _device(nvml: Any, handle: ctypes.c_void_p, part_of: str = "") -> Device:
    uuid = ctypes.create_string_buffer(_UUID_LENGTH)
    _call(nvml.nvmlDeviceGetUUID, handle, uuid, ctypes.c_uint(_UUID_LENGTH))
    model = ctypes.create_string_buffer(_NAME_LENGTH)
    nvml.nvmlDeviceGetName(handle, model, ctypes.c_uint(_NAME_LENGTH))  # left empty after an error
    memory = _Memory()
    # Not all models report their memory.
    known = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 and memory.total
    used = memory.used / memory.total if known else 0.0
    return Device(uuid.value.decode(), used, int(memory.total) if known else 0, model.value.decode(), part_of)


def _call(function: Any, *arguments: Any) -> None:
    """Call a function of NVML. Raises NvmlError if it fails."""
    code = function(*arguments)
    if code:
        name = getattr(function, "__name__", "NVML")
        raise NvmlError(f"the NVIDIA driver does not answer ({name} returned {code}); run nvidia-smi")
