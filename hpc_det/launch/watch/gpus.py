"""What the NVIDIA driver says of this node's devices, asked through its own library: nvidia-smi takes ten times longer.

The library is NVML, nvml.h of the CUDA toolkit; it shows no more devices than the job's cgroup or container does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_UUID_LENGTH = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
MOST_USED = 0.5
"""Of a device's memory. Our own ranks are not there yet."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlError(Exception):
    pass


@dataclass(frozen=True)
class Device:
    uuid: str
    """GPU-... or MIG-..., without more."""
    used: float
    """Share of its memory, from 0 to 1."""


def device_problem(needed: int, env: Mapping[str, str], nvml: Any | None = None) -> str | None:
    """Why `needed` ranks cannot have a GPU each on this node, in a sentence; None: they can.

    A node without a trace of the driver says nothing: its slots may be of another make. `nvml`: the library.
    """
    try:
        nvml = nvml or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    try:
        devices = list(_devices(nvml))
    except NvmlError as error:
        return f"the NVIDIA driver does not answer ({error}); see what nvidia-smi says there"
    return _problem(needed, devices, env.get("CUDA_VISIBLE_DEVICES"))


def _problem(needed: int, devices: list[Device], visible: str | None) -> str | None:
    mine, missing = _visible(devices, visible)
    given = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    if missing:
        return f"no such GPU: {', '.join(missing)}{given}"
    if len(mine) < needed:
        return f"{len(mine)} of {needed} GPUs{given}"
    busy = [f"{device.uuid} ({device.used:.0%})" for device in mine[:needed] if device.used > MOST_USED]
    return f"somebody holds most of the memory of {', '.join(busy)}" if busy else None


def _visible(devices: list[Device], visible: str | None) -> tuple[list[Device], list[str]]:
    """The devices that CUDA shows to a rank, and what of `visible` is none: numbers, or beginnings of UUIDs."""
    gpus = [device for device in devices if device.uuid.startswith("GPU-")]
    if visible is None:
        return gpus, []
    mine, missing = [], []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name.isdecimal():
            found = gpus[int(name) : int(name) + 1]
        else:
            found = [device for device in devices if device.uuid.startswith(_plain(name))][:1]
        mine += found
        missing += [] if found else [name]
    return mine, missing


def _plain(name: str) -> str:
    """Drivers before 470 wrote MIG-GPU-UUID/INSTANCE/INSTANCE, which NVML now knows by the GPU."""
    return name.split("/")[0].removeprefix("MIG-") if name.startswith("MIG-GPU-") else name


def _devices(nvml: Any) -> Iterator[Device]:
    """GPUs in the driver's order, each followed by its MIG devices."""
    _ask(nvml.nvmlInit_v2)
    try:
        for handle in _handles(nvml):
            yield _device(nvml, handle)
            yield from (_device(nvml, part) for part in _mig_handles(nvml, handle))
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint()
    _ask(nvml.nvmlDeviceGetCount_v2, ctypes.byref(count))
    for index in range(count.value):
        handle = ctypes.c_void_p()
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        if code == 0:  # NVML_ERROR_NO_PERMISSION: another job's
            yield handle


def _mig_handles(nvml: Any, gpu: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(count)):
        return
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            yield handle


def _device(nvml: Any, handle: ctypes.c_void_p) -> Device:
    uuid = ctypes.create_string_buffer(_UUID_LENGTH)
    _ask(nvml.nvmlDeviceGetUUID, handle, uuid, ctypes.c_uint(_UUID_LENGTH))
    memory = _Memory()
    known = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 and memory.total  # not of all makes
    return Device(uuid.value.decode(), memory.used / memory.total if known else 0.0)


def _ask(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    if code:
        raise NvmlError(f"{getattr(function, '__name__', 'NVML')} returned {code}")
