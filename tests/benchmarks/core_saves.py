"""Saves of a tracked model: the time for which training waits, beside one copy of the same bytes in memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hpc_det.core
from tests.benchmarks.checkpoint_savers import floors, kept_stager, one_rank, torchs

TENSORS = 50
COPY = "copy"
FIRST = "core.save(), the first, before a batch"
AFTER_BATCHES = "core.save(), the first, after batches"
LATER = "core.save(), a later one"
DCP = "dcp.async_save, a thread and a kept stager"
SETTLE_BATCHES = 3

Save = Callable[[Path], float]
"""Saves into a new folder and returns the seconds for which training waits, when the checkpoint is on disk."""


def measured(root: Path, size_mb: int, rounds: int) -> dict[str, list[float]]:
    """Return the stalls in seconds of each save in each round. Stagers are warm, apart from those of first saves."""
    model = new_model(size_mb)
    with one_rank(root), kept_stager() as stager, hpc_det.core.init(name="later") as core:
        core.track(model=model)
        state = {name: value.detach() for name, value in model.named_parameters()}
        saves: dict[str, Save] = {
            COPY: lambda folder: floors_of[COPY](folder).stall_s,
            FIRST: lambda folder: _first(model, folder, batches=0),
            AFTER_BATCHES: lambda folder: _first(model, folder, batches=SETTLE_BATCHES),
            LATER: lambda folder: _saved(core),
            DCP: lambda folder: torchs_of[DCP](folder).stall_s,
            **synchronous(model),
        }
        floors_of, torchs_of = floors(state), torchs(state, stager)
        taken: dict[str, list[float]] = {name: [] for name in saves}
        for number in range(rounds + 1):
            names = list(saves)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                folder = root / "saved"
                folder.mkdir()
                taken[name].append(saves[name](folder))
                shutil.rmtree(folder)
    return {name: stalls[1:] for name, stalls in taken.items()}


def new_model(size_mb: int) -> nn.Module:
    numbers = size_mb * 1_000_000 // 4 // TENSORS
    return nn.ParameterList([nn.Parameter(torch.randn(numbers)) for _ in range(TENSORS)])


def synchronous(model: nn.Module) -> dict[str, Save]:
    """Return the saves of other packages, for which training waits until they have written; none flushes the disk."""
    found: dict[str, Save] = {}
    if find_spec("lightning"):
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        found["fabric.save"] = lambda folder: _seconds(lambda: fabric.save(folder / "a.ckpt", {"model": model}))
    if find_spec("accelerate"):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare_model(model)
        found["accelerator.save_state"] = lambda folder: _seconds(lambda: accelerator.save_state(str(folder)))
    return found


def _first(model: nn.Module, folder: Path, *, batches: int) -> float:
    """Return the stall of the first save of a new run, after this number of batches that take 0.5 s each."""
    with hpc_det.core.init(name=f"first-{time.time_ns()}") as core:
        core.track(model=model)
        for _ in core.batches([0.5] * batches):
            time.sleep(0.5)
        return _saved(core)


def _saved(core: hpc_det.core.Core) -> float:
    core.report(core.step + 1, {})  # a step of a loop, so that there is something to save
    stall_s = _seconds(core.save)
    core._saves.saver.settle()
    return stall_s


def _seconds(save: Callable[[], Any]) -> float:
    began = time.perf_counter()
    save()
    return time.perf_counter() - began
