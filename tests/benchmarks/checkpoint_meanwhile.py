"""Measure how much a save in the background slows the training."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.distributed.collectives import Distributed
from tests.benchmarks.checkpoint_savers import State, kept_stager, one_rank, state_of

ALONE_S = 1.0
"""Seconds for which batches are measured before each save."""
IsDone = Callable[[], bool]
Begin = Callable[[Path], IsDone]


@dataclass(frozen=True)
class Meanwhile:
    ratio: float
    """Mean time of a batch while the save is in flight, relative to a batch just before it."""
    lost_s: float
    """Total delay of all batches in that time."""


def measured(root: Path, size_mb: int, rounds: int) -> dict[str, list[Meanwhile]]:
    """Return the results of each way in each round, without the first, in which it allocates its memory."""
    state = state_of(size_mb)
    with one_rank(root), ways(state, root / "checkpoints") as begins:
        taken: dict[str, list[Meanwhile]] = {name: [] for name in begins}
        for number in range(rounds + 1):
            for name, begin in begins.items():
                result = _beside(begin, root / "saved")
                if number:
                    taken[name].append(result)
    return taken


@contextmanager
def ways(state: State, checkpoints: Path) -> Iterator[dict[str, Begin]]:
    checkpoints.mkdir()
    context = CheckpointContext(checkpoints, Distributed())

    def ours(folder: Path) -> IsDone:
        assert context.settled(wait=True)
        shutil.rmtree(checkpoints)
        checkpoints.mkdir()
        context.begin(1, {"state_dict.pth": state})
        return lambda: context.settled(wait=False)

    def torchs(folder: Path, **how: Any) -> IsDone:
        answer: Any = dcp.async_save(state, checkpoint_id=folder / "dcp", **how)
        future: Future[Any] = getattr(answer, "upload_completion", answer)
        return future.done

    with kept_stager() as stager:
        yield {
            "dcp.async_save, a thread and a kept stager": lambda folder: torchs(folder, async_stager=stager),
            "dcp.async_save, a process": lambda folder: torchs(
                folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            ),
            "hpc_det": ours,
        }


def _beside(begin: Begin, folder: Path) -> Meanwhile:
    folder.mkdir()
    gc.collect()
    train = batch()
    end = time.perf_counter() + ALONE_S
    alone_s, _ = _trained(train, lambda: time.perf_counter() >= end)
    during_s, count = _trained(train, begin(folder))
    shutil.rmtree(folder)
    return Meanwhile(during_s / alone_s, (during_s - alone_s) * count)


def _trained(train: Callable[[], None], until: Callable[[], bool]) -> tuple[float, int]:
    """Return the mean time of a batch [s], and the number of batches."""
    began, count = time.perf_counter(), 0
    while not until() or not count:
        train()
        count += 1
    return (time.perf_counter() - began) / count, count


def batch() -> Callable[[], None]:
    """Return a function that trains a batch of some milliseconds on all cores."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(256, 512), torch.randint(10, (256,))

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return train
