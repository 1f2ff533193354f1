"""A report of one number after every batch: what the call takes, and what all threads do for it.

`core.report` writes the trial's metrics file and TensorBoard's, after the call and in another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

import hpc_det.core
from tests.benchmarks.turns import RATE, new_model, ready_made_batches

BATCHES, ALONE = 5000, 2000
"""Reports of a turn: after batches, for more than a second; and without batches, for the CPU time."""
QUEUE = 10_000
"""TensorBoard's queue for all others, as long as that of hpc_det: with torch's 10, a call waits for the writer."""
OURS = "core.report"

Log = Callable[[int, float], object]
Way = tuple[Log, Callable[[], object]]
"""The call with the number of batches and the loss, and the one that waits until everything is written."""


class Taken(NamedTuple):
    """Microseconds."""

    median: float
    high: float
    """99.9 % of the calls take less."""
    mean: float
    cpu: float
    """CPU time of all threads for a report, until it is written."""


def measured(root: Path, rounds: int) -> dict[str, list[Taken]]:
    """Return the results of each round. The first round, which loads modules, is not counted."""
    with hpc_det.core.init(name="reports") as core:
        ways = {OURS: ours(core), **fabrics(root), **accelerates(root)}
        taken: dict[str, list[Taken]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, way in ways.items():
                taken[name].append(_turn(way, number * (BATCHES + ALONE)))
        for _, finish in ways.values():
            finish()
    return {name: results[1:] for name, results in taken.items()}


def ours(core: hpc_det.core.Core) -> Way:
    def finish() -> None:
        assert core._reports
        core._reports.write()
        core._tensorboard.flush()

    return lambda step, loss: core.report(step, {"loss": loss}), finish


def fabrics(root: Path) -> dict[str, Way]:
    if not find_spec("lightning"):
        return {}
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger, TensorBoardLogger

    loggers = {
        "fabric.log, CSVLogger": CSVLogger(root / "csv", flush_logs_every_n_steps=1000),
        "fabric.log, TensorBoardLogger": TensorBoardLogger(root / "tensorboard", max_queue=QUEUE),
    }

    def way(logger: Any) -> Way:
        fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
        fabric.launch()
        finish = logger.save if isinstance(logger, CSVLogger) else lambda: logger.experiment.flush()
        return lambda step, loss: fabric.log("loss", loss, step=step), finish

    return {name: way(logger) for name, logger in loggers.items()}


def accelerates(root: Path) -> dict[str, Way]:
    if not find_spec("accelerate"):
        return {}
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=root / "accelerate")
    accelerator.init_trackers("bench", init_kwargs={"tensorboard": {"max_queue": QUEUE}})
    writer = accelerator.get_tracker("tensorboard").writer
    return {"accelerator.log, tensorboard": (lambda step, loss: accelerator.log({"loss": loss}, step), writer.flush)}


def _turn(way: Way, done: int) -> Taken:
    log, finish = way
    calls = sorted(_calls(log, done))
    finish()
    began_s = time.process_time()
    for step in range(done + BATCHES + 1, done + BATCHES + ALONE + 1):
        log(step, 0.5)
    finish()
    cpu_us = (time.process_time() - began_s) / ALONE * 1e6
    median, high, mean = calls[BATCHES // 2], calls[BATCHES * 999 // 1000], sum(calls) / BATCHES
    return Taken(median / 1000, high / 1000, mean / 1000, cpu_us)


def _calls(log: Log, done: int) -> list[int]:
    """Train BATCHES batches of a small model, and return the nanoseconds of the calls."""
    model, calls, clock = new_model(), [], time.perf_counter_ns
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = cycle(ready_made_batches())
    for step in range(done + 1, done + BATCHES + 1):
        inputs, targets = next(batches)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        value, began = loss.item(), clock()
        log(step, value)
        calls.append(clock() - began)
    return calls
