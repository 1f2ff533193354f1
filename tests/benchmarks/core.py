"""Measure the calls of the Core API in a loop of the user's, beside those of Fabric, Accelerate and torch.

`python -m tests.benchmarks core`. CORE_PARTS selects parts of it (stops, reports, batches, saves); CORE_ROUNDS is the
number of rounds, CORE_MB the size of what is saved.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import torch

from tests.benchmarks import core_batches, core_reports, core_saves, core_stops
from tests.benchmarks.loop_overhead import silence
from tests.benchmarks.table import show

ROUNDS = int(os.environ.get("CORE_ROUNDS", 0))
SIZE_MB = int(os.environ.get("CORE_MB", 1000))


def main() -> None:
    torch.set_num_threads(1)
    parts = {"stops": stops, "reports": reports, "batches": batches, "saves": saves}
    for name in os.environ.get("CORE_PARTS", ",".join(parts)).split(","):
        with tempfile.TemporaryDirectory() as root:
            os.environ["HPC_DET_ROOT"] = root
            parts[name](Path(root))


def stops(root: Path) -> None:
    rounds = ROUNDS or 200
    with silence():
        alone, gang = core_stops.on_one_rank(rounds), core_stops.on_two_ranks(rounds)
    for title, taken in (("one rank", alone), ("two ranks", gang)):
        show(
            f"a check for a stop, {title}, {rounds} rounds in turns, microseconds of a call",
            ("call", "best round", "median round"),
            [[name, f"{min(values):.3f}", f"{statistics.median(values):.3f}"] for name, values in taken.items()],
        )


def reports(root: Path) -> None:
    rounds = ROUNDS or 5
    with silence():
        taken = core_reports.measured(root, rounds)
    show(
        f"a report of one number after each of {core_reports.BATCHES} batches, {rounds} rounds in turns, microseconds",
        ("call", "median call", "99.9 % of calls are below", "mean call", "CPU time of all threads for a report"),
        [
            [name, *(f"{statistics.median(values):.1f}" for values in zip(*of_rounds, strict=True))]
            for name, of_rounds in taken.items()
        ],
    )


def batches(root: Path) -> None:
    rounds = ROUNDS or 200
    with silence():
        taken = core_batches.measured(rounds)
    plain = taken[core_batches.PLAIN]
    show(
        f"a DataLoader of {core_batches.RECORDS} batches, {rounds} rounds in turns, microseconds of a median batch",
        ("loop over", "best round", "added in the same round (quartiles)"),
        [[name, f"{min(values):.2f}", *_added(plain, values)] for name, values in taken.items()],
    )


def _added(plain: list[float], values: list[float]) -> list[str]:
    differences = [value - floor for value, floor in zip(values, plain, strict=True)]
    low, median, high = statistics.quantiles(differences, n=4, method="inclusive")
    return [f"{median:+.2f} ({low:+.2f}, {high:+.2f})"]


def saves(root: Path) -> None:
    rounds = ROUNDS or 5
    with silence():
        taken = core_saves.measured(root, SIZE_MB, rounds)
    copies = taken.pop(core_saves.COPY)
    show(
        f"{SIZE_MB} MB of a model in {core_saves.TENSORS} tensors, {rounds} rounds in turns; a copy into existing "
        f"memory takes {statistics.median(copies):.3f} s",
        ("save", "stall [s]", "best", "stall / copy of the round (quartiles)"),
        [[name, *_stalls(copies, values)] for name, values in taken.items()],
    )


def _stalls(copies: list[float], stalls: list[float]) -> list[str]:
    ratios = [stall / copy for stall, copy in zip(stalls, copies, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [f"{statistics.median(stalls):.3f}", f"{min(stalls):.3f}", f"{median:.2f} ({low:.2f}, {high:.2f})"]


if __name__ == "__main__":
    main()
