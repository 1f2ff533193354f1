"""What a loop's own iterator over a DataLoader adds to each batch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

import hpc_det.core

RECORDS = 200
PLAIN = "the DataLoader"


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> int:
        return number


def measured(rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of the median batch of each round. The first pass of each is not counted."""
    with hpc_det.core.init(name="batches") as core:
        core.track(model=nn.Linear(1, 1))
        loader = new_loader()
        passes: dict[str, Callable[[], Iterable[Any]]] = {
            PLAIN: lambda: loader,
            "core.batches(loader)": lambda: core.batches(loader),
            **others(),
        }
        taken: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(rounds + 1):
            for name, begin in passes.items():
                taken[name].append(_median_us(begin()))
    return {name: values[1:] for name, values in taken.items()}


def new_loader() -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=1, collate_fn=len)


def others() -> dict[str, Callable[[], Iterable[Any]]]:
    """Return the loaders of other packages at their best: without moving batches to the device."""
    found: dict[str, Callable[[], Iterable[Any]]] = {}
    if find_spec("lightning"):
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        fabrics = fabric.setup_dataloaders(new_loader(), use_distributed_sampler=False, move_to_device=False)
        found["fabric.setup_dataloaders(loader)"] = lambda: fabrics
    if find_spec("accelerate"):
        from accelerate import Accelerator

        accelerates = Accelerator(cpu=True).prepare_data_loader(new_loader(), device_placement=False)
        found["accelerator.prepare(loader)"] = lambda: accelerates
    return found


def _median_us(batches: Iterable[Any]) -> float:
    return statistics.median(after - before for before, after in pairwise(_times(iter(batches)))) / 1000


def _times(batches: Iterator[Any]) -> list[int]:
    """Return the times in nanoseconds at which the loop gets a batch."""
    times = []
    for _ in batches:
        times.append(perf_counter_ns())
    return times
