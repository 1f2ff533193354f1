"""What the NVIDIA driver says of a node's GPUs, asked through NVIDIA's own nvidia-ml-py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any


class Gpus:
    """Those that the job's cgroup or container shows; none on a node without them, or without the driver."""

    def __init__(self) -> None:
        self._nvml, self._handles = _started()

    def look(self) -> dict[str, dict[str, float]]:
        """{UUID: {"util": percent of the time in which it computed anything, "memory_free": bytes}}.

        A GPU that is cut into MIG devices does not say it, and is left out.
        """
        return dict(self._answers())

    def _answers(self) -> Iterator[tuple[str, dict[str, float]]]:
        nvml = self._nvml
        for uuid, handle in self._handles.items():
            try:
                util, memory = nvml.nvmlDeviceGetUtilizationRates(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError:
                continue
            yield uuid, {"util": float(util.gpu), "memory_free": int(memory.free)}

    def close(self) -> None:
        if self._handles:
            self._nvml.nvmlShutdown()


def _started() -> tuple[Any, dict[str, Any]]:
    """The library, and a handle for each GPU by its UUID."""
    try:
        import pynvml
    except ImportError:
        return None, {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return pynvml, {}
    return pynvml, dict(_handles(pynvml))


def _handles(nvml: Any) -> Iterator[tuple[str, Any]]:
    """Of the GPUs that answer: one that has fallen off the bus says nothing, and need not be this trial's."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield nvml.nvmlDeviceGetUUID(handle), handle
