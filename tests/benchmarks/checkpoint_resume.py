"""Measure a trial with a large state: from the notice to the commit, and from its start to its first batch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_det.checkpoint.committed import committed
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import PyTorchTrial
from tests.benchmarks import loops
from tests.benchmarks.checkpoint_savers import BLOCK, floors, state_of
from tests.benchmarks.gpu import Notified
from tests.benchmarks.turns import device, ready_made_batches
from tests.distributed.ranks import run_on_ranks
from tests.pytorch.trials import Life, StopAt

FLOOR = "a raw read and the construction"
WIDTH = 2048
BYTES_OF_LAYER = 3 * 4 * (WIDTH * WIDTH + WIDTH)
"""A layer with two moments of each weight."""
RECORDS = 4


class FirstBatch(Exception):
    """Raised when a trial reaches its first batch, with the saved state loaded."""


def large_model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device())


def large_trial(size_mb: int) -> type[PyTorchTrial]:
    layers = max(size_mb * 1_000_000 // BYTES_OF_LAYER, 1)

    class Large(loops.Linear):
        new_model = staticmethod(lambda: large_model(layers))

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.optimizers.clear()
            self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))

        def build_validation_data_loader(self) -> Any:
            return ready_made_batches(1, RECORDS, WIDTH)

    return loops.with_data(Large, ready_made_batches(4, RECORDS, WIDTH) * 25)


def new_life(folder: Path, size_mb: int) -> Life:
    return loops.new_life(folder, large_trial(size_mb), 1000)


# --- from the notice to the commit


def notices(root: Path, size_mb: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the times of a copy and a raw write, and the times from the notice to the commit, measured in turns."""
    state = state_of(size_mb)
    ways = floors(state)
    floors_s, seconds = [], []
    for number in range(rounds):
        raw = root / "raw"
        raw.mkdir()
        write = ways["raw write and fsync"](raw).durable_s
        assert write is not None
        floors_s.append(ways["copy"](raw).stall_s + write)
        shutil.rmtree(raw)
        life, stop = new_life(root / f"life {number}", size_mb), Notified(10)
        life.attempt(stop)
        (checkpoint,) = committed(life.folder.checkpoints)
        seconds.append(checkpoint.time - stop.at)
        shutil.rmtree(root / f"life {number}")
    return floors_s, seconds


# --- from the start to the first batch


def resumes(root: Path, size_mb: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    life = saved_life(root / "life", size_mb)
    (checkpoint,) = committed(life.folder.checkpoints)
    ways: dict[str, Callable[[], object]] = {
        FLOOR: lambda: floor(life, checkpoint.path),
        "hpc_det": lambda: until_first_batch(life),
        "torch.load by hand, nothing verified": lambda: by_hand(life, checkpoint.path / "state_dict.pth"),
    }
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for state in ("cold", "warm"):
            for name, way in ways.items():
                if state == "cold":
                    put_out_of_memory(checkpoint.path)
                else:
                    read_blocks(checkpoint.path)
                began = time.perf_counter()
                way()
                if number:
                    taken.setdefault((state, name), []).append(time.perf_counter() - began)
    shutil.rmtree(root / "life")
    return taken


def saved_life(folder: Path, size_mb: int) -> Life:
    life = new_life(folder, size_mb)
    life.attempt(StopAt(2))
    return life


def until_first_batch(life: Life, distributed: Distributed | None = None) -> None:
    class Ended(life.trial_class):  # type: ignore[misc, name-defined]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise FirstBatch

    try:
        Life(life.folder, Ended, life.config, life.hparams, attempts=life.attempts).attempt(None, distributed)
    except FirstBatch:
        return
    raise AssertionError("the trial trained no batch")


def floor(life: Life, checkpoint: Path) -> None:
    read_blocks(checkpoint)
    constructed(life)


def constructed(life: Life) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = life.trial_class.new_model()  # type: ignore[attr-defined]
    return model, torch.optim.Adam(model.parameters())


def by_hand(life: Life, file: Path) -> None:
    model, optimizer = constructed(life)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["models_state_dict"][0])
    optimizer.load_state_dict(state["optimizers_state_dict"][0])


def read_blocks(folder: Path) -> None:
    """Read every file, in large blocks into one buffer."""
    buffer = bytearray(BLOCK)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def put_out_of_memory(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- what two ranks read


def bytes_read_by_two(root: Path, size_mb: int) -> dict[str, float]:
    """Return how much two ranks read by system calls, relative to the checkpoint's size."""
    life = saved_life(root / "two", size_mb)
    (checkpoint,) = committed(life.folder.checkpoints)
    ways: dict[str, Any] = {"hpc_det": resumes_on_a_rank, "torch.load by hand on each rank": loads_on_a_rank}
    read = {
        name: sum(run_on_ranks(2, way, root / "two", size_mb, checkpoint.path)) / checkpoint.size_bytes
        for name, way in ways.items()
    }
    shutil.rmtree(root / "two")
    return read


def resumes_on_a_rank(distributed: Distributed, folder: Path, size_mb: int, checkpoint: Path) -> int:
    life = new_life(folder / f"of rank {distributed.rank}", size_mb)
    life.folder.checkpoints.rmdir()
    life.folder.checkpoints.symlink_to(checkpoint.parent)
    until_first_batch(life, distributed)  # the first run reads modules, too
    before = bytes_read()
    until_first_batch(life, distributed)
    return bytes_read() - before


def loads_on_a_rank(distributed: Distributed, folder: Path, size_mb: int, checkpoint: Path) -> int:
    before = bytes_read()
    by_hand(new_life(folder / f"by hand {distributed.rank}", size_mb), checkpoint / "state_dict.pth")
    return bytes_read() - before


def read_and_broadcast_s(root: Path, size_mb: int) -> tuple[float, float]:
    """Return the time of a raw read of the checkpoint, and the time in which gloo sends it from one rank to another."""
    life = saved_life(root / "two", size_mb)
    (checkpoint,) = committed(life.folder.checkpoints)
    put_out_of_memory(checkpoint.path)
    began = time.perf_counter()
    read_blocks(checkpoint.path)
    read_s = time.perf_counter() - began
    shutil.rmtree(root / "two")
    return read_s, max(run_on_ranks(2, broadcast_on_a_rank, checkpoint.size_bytes))


def broadcast_on_a_rank(distributed: Distributed, size: int) -> float:
    block = torch.zeros(BLOCK, dtype=torch.uint8)
    dist.broadcast(block, 0)
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(0, size, BLOCK):
        dist.broadcast(block, 0)
    distributed.barrier()
    return time.perf_counter() - began


def bytes_read() -> int:
    """Return the bytes that this process has read, from disk or cache (proc(5))."""
    return int(Path("/proc/self/io").read_text().split()[1])
