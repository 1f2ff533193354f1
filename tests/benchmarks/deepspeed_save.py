"""Measure checkpoints of 450 MB of DeepSpeed engines on two ranks: how long training waits for a save, beside one copy
of as many bytes into warm memory; the time until it is durable, and its memory, beside the engine's own save_checkpoint
and fsync; from the notice to the commit; the check before a resume.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.pytorch.deepspeed import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.strategy import DeepSpeedStrategy
from hpc_det.pytorch.trial.callback import Callbacks
from tests.benchmarks import loops
from tests.benchmarks.engines import Case, Trained
from tests.benchmarks.gpu import Notified
from tests.benchmarks.table import show
from tests.benchmarks.turns import ready_made_batches
from tests.distributed.ranks import PRELOAD, run_on_ranks

RANKS = 2
STAGES = (0, 1, 2, 3)
WIDTH, HIDDEN = 2048, 9
ROUNDS = 5
DEADLINE_S = 900


@dataclass(frozen=True)
class Measured:
    """The time on one rank, and the growth of its memory."""

    seconds: float
    added_mb: float


@dataclass(frozen=True)
class OfRank:
    before_mb: float
    checkpoint_mb: float
    measured: dict[str, list[Measured]]

    def seconds(self, what: str) -> float:
        return statistics.median(each.seconds for each in self.measured[what])

    def ratio(self, what: str, floor: str) -> str:
        """Return the median and the quartiles of the ratio within a round."""
        pairs = zip(self.measured[what], self.measured[floor], strict=True)
        low, middle, high = statistics.quantiles((a.seconds / b.seconds for a, b in pairs), n=4, method="inclusive")
        return f"{middle:.2f} ({low:.2f}, {high:.2f})"

    def added_mb(self, what: str) -> float:
        return max(each.added_mb for each in self.measured[what])


def main() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    times, memory = zip(*map(_rows, STAGES), strict=True)
    show(
        f"{RANKS} ranks, median of {ROUNDS} rounds in turns, seconds",
        (
            *("ZeRO", "MB", "a copy", "training waits", "ratio (quartiles)"),
            *("the engine's", "ours is durable", "ratio (quartiles)", "from the notice", "check before a resume"),
        ),
        times,
    )
    show(
        "the rank that needs most, MB",
        ("ZeRO", "before a save", "added by the engine's", "added by ours"),
        memory,
    )


def _rows(stage: int) -> tuple[list[str], list[str]]:
    case = Case(f"ZeRO {stage}", stage=stage, width=WIDTH, hidden=HIDDEN)
    with tempfile.TemporaryDirectory() as root:
        by_rank: list[OfRank] = run_on_ranks(RANKS, saves_on_a_rank, case, Path(root), deadline_s=DEADLINE_S)
    with tempfile.TemporaryDirectory() as root:
        noticed = run_on_ranks(RANKS, notice_on_a_rank, case, Path(root), deadline_s=DEADLINE_S)[0]
    first = by_rank[0]
    times = [f"{first.checkpoint_mb:.0f}"]
    for floor, what in (("copy", "stall"), ("theirs", "ours")):
        times += [f"{first.seconds(floor):.2f}", f"{first.seconds(what):.2f}", first.ratio(what, floor)]
    times += [f"{noticed:.2f}", f"{first.seconds('check'):.2f}"]
    largest = [max(rank.before_mb for rank in by_rank)]
    largest += [max(rank.added_mb(whose) for rank in by_rank) for whose in ("theirs", "first")]
    return [str(stage), *times], [str(stage), *(f"{amount:.0f}" for amount in largest)]


def saves_on_a_rank(distributed: Distributed, case: Case, root: Path) -> OfRank:
    context = DeepSpeedTrialContext({"hparams": {}, "config": {}}, distributed)
    trained: Any = type("Large", (Trained,), {"case": case})
    trial: Trained = trained(context)
    engine, strategy = trial.engine, DeepSpeedStrategy(trial, context)
    case.train_batch(engine, iter(ready_made_batches()))
    checkpoints = CheckpointContext(root, distributed)

    def theirs() -> None:
        engine.save_checkpoint(root / "theirs", tag="model0")
        for path in (root / "theirs").rglob("*.pt"):
            _flush(path)

    def ours() -> None:
        began = time.perf_counter()
        checkpoints.begin(1, strategy.files(Callbacks({}), MetricWindow()), write=strategy.write)
        measured["stall"].append(Measured(time.perf_counter() - began, 0))
        checkpoints.settled(wait=True)

    def copy() -> None:
        warm.copy_(source)

    def check() -> None:
        checkpoints.newest()

    before = _memory_mb("VmRSS")
    measured: dict[str, list[Measured]] = {what: [] for what in ("theirs", "ours", "stall", "check", "copy")}
    measured["first"] = [_measured(distributed, ours)]  # which keeps its memory for the next save
    source = torch.ones(_of_this_rank(committed(root)[0], distributed.size), dtype=torch.uint8)
    warm = source.clone()
    measured["stall"].clear()
    for number in range(ROUNDS):
        _clear(distributed, root)
        for save in (theirs, ours) if number % 2 else (ours, theirs):
            engine.checkpoint_engine = TorchCheckpointEngine(engine._config) if save is theirs else context.shards
            measured[save.__name__].append(_measured(distributed, save))
        measured["copy"].append(_measured(distributed, copy))
        measured["check"].append(_measured(distributed, check))
    checkpoint = committed(root)[0]
    return OfRank(before, sum(entry.size for entry in checkpoint.files.values()) / 1e6, measured)


def _of_this_rank(checkpoint: Committed, ranks: int) -> int:
    """Return the bytes of one rank; all ranks have the same amount."""
    return sum(entry.size for entry in checkpoint.files.values()) // ranks


def _clear(distributed: Distributed, root: Path) -> None:
    distributed.barrier()
    if distributed.is_chief:
        for path in root.iterdir():
            shutil.rmtree(path)
    distributed.barrier()


def notice_on_a_rank(distributed: Distributed, case: Case, root: Path) -> float:
    """Return the seconds from a notice in training to the commit, in lives that each resume the one before."""
    trained: Any = type("Large", (Trained,), {"case": case})
    life = loops.new_life(root, trained, 1000, {})
    seconds = []
    for _ in range(ROUNDS):
        stop = Notified(10)
        life.attempt(stop, distributed)
        seconds.append(committed(life.folder.checkpoints)[0].time - stop.at)
    return statistics.median(seconds)


def _measured(distributed: Distributed, work: Callable[[], None]) -> Measured:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (proc(5))
    before = _memory_mb("VmRSS")
    distributed.barrier()
    began = time.perf_counter()
    work()
    distributed.barrier()
    return Measured(time.perf_counter() - began, _memory_mb("VmHWM") - before)


def _memory_mb(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
