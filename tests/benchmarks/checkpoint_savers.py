"""The ways to save: the machine's floors, torch's own ways, and ours."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.distributed.collectives import Distributed

TENSORS = 50
RAW = ("raw write and fsync", "raw write, O_DIRECT")
BLOCK = 1 << 24
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Taken:
    stall_s: float
    """Time for which training is blocked."""
    durable_s: float | None
    """Time until the checkpoint is on disk; None: unknown."""
    added_mb: float = 0.0
    """Peak memory of the process, minus its memory before."""


Way = Callable[[Path], Taken]


def measured(root: Path, size_mb: int, rounds: int) -> dict[str, list[Taken]]:
    """Return the results of each way in each round. In the first round, ways allocate the memory that they keep."""
    state = state_of(size_mb)
    with one_rank(root), kept_stager() as stager:
        ways: dict[str, Way] = floors(state) | torchs(state, stager) | ours(state, root / "checkpoints")
        taken: dict[str, list[Taken]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                result = _alone(ways[name], root / "saved")
                taken[name].append(result)
    return taken


def state_of(size_mb: int) -> State:
    numbers = size_mb * 1_000_000 // 4 // TENSORS
    return {f"layer{k}.weight": torch.randn(numbers) for k in range(TENSORS)}


# --- the floors


def floors(state: State) -> dict[str, Way]:
    warm = mmap.mmap(-1, -(-sum(tensor.nbytes for tensor in state.values()) // BLOCK) * BLOCK)
    buffer = memoryview(warm)
    start = ctypes.addressof(ctypes.c_char.from_buffer(warm))

    def copy(folder: Path) -> Taken:
        began, at = time.perf_counter(), start
        for tensor in state.values():
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        return Taken(time.perf_counter() - began, None)

    def write(folder: Path, flags: int = 0) -> Taken:
        began = time.perf_counter()
        write_blocks(folder / "raw", buffer, flags)
        seconds = time.perf_counter() - began
        return Taken(seconds, seconds)

    return {"copy": copy, "raw write and fsync": write, "raw write, O_DIRECT": lambda at: write(at, os.O_DIRECT)}


def write_blocks(path: Path, buffer: memoryview, flags: int = 0) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | flags, 0o600)
    for offset in range(0, len(buffer), BLOCK):
        os.write(file, buffer[offset : offset + BLOCK])
    os.fsync(file)
    os.close(file)


# --- torch's


@contextmanager
def kept_stager() -> Iterator[DefaultStager]:
    """Yield a stager that keeps its memory for the next save."""
    has_gpu = torch.cuda.is_available()
    options = StagingOptions(has_gpu, has_gpu, has_gpu, has_gpu)
    stager = DefaultStager(options)
    yield stager
    stager.close()


def torchs(state: State, stager: DefaultStager) -> dict[str, Way]:
    def plain(folder: Path) -> Taken:
        began = time.perf_counter()
        torch.save(state, folder / "a.pth")
        return Taken(time.perf_counter() - began, None)

    def flushed(folder: Path) -> Taken:
        began = time.perf_counter()
        with (folder / "a.pth").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return Taken(seconds, seconds)

    def dcp_save(folder: Path) -> Taken:
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=folder / "dcp")
        seconds = time.perf_counter() - began
        return Taken(seconds, seconds)

    def dcp_async(folder: Path, **how: Any) -> Taken:
        began = time.perf_counter()
        answer: Any = dcp.async_save(state, checkpoint_id=folder / "dcp", **how)
        stall = time.perf_counter() - began
        getattr(answer, "upload_completion", answer).result()
        return Taken(stall, time.perf_counter() - began)

    return {
        "torch.save": plain,
        "torch.save and fsync": flushed,
        "dcp.save": dcp_save,
        "dcp.async_save, a thread": lambda folder: dcp_async(folder),
        "dcp.async_save, a thread and a kept stager": lambda folder: dcp_async(folder, async_stager=stager),
        "dcp.async_save, a process": lambda folder: dcp_async(
            folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ),
    }


# --- ours


def ours(state: State, checkpoints: Path) -> dict[str, Way]:
    checkpoints.mkdir()
    context = CheckpointContext(checkpoints, Distributed())
    context.allocate({"state_dict.pth": state})  # as the loop does after the first batches

    def behind(folder: Path) -> Taken:
        began = time.perf_counter()
        uuid = context.begin(1, {"state_dict.pth": state})
        stall = time.perf_counter() - began
        assert context.settled(wait=True)
        seconds = time.perf_counter() - began
        shutil.rmtree(checkpoints / uuid)
        return Taken(stall, seconds)

    def waiting(folder: Path) -> Taken:
        began = time.perf_counter()
        uuid = context.save(1, {"state_dict.pth": state})
        seconds = time.perf_counter() - began
        shutil.rmtree(checkpoints / uuid)
        return Taken(seconds, seconds)

    return {"hpc_det": behind, "hpc_det, not behind the training": waiting}


# --- around them


@contextmanager
def one_rank(root: Path) -> Iterator[None]:
    """Create a process group for torch's ways."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{root}/group", rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    dist.destroy_process_group()


def _alone(way: Way, folder: Path) -> Taken:
    """Measure a way in a new folder, after all freed memory has gone back to the kernel."""
    folder.mkdir()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (proc(5))
    before = memory_mb("VmRSS")
    taken = way(folder)
    added = memory_mb("VmHWM") - before
    shutil.rmtree(folder)
    return Taken(taken.stall_s, taken.durable_s, added)


def memory_mb(name: str) -> float:
    """Return the memory of this process. `name`: VmRSS for the present, VmHWM for the peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6
