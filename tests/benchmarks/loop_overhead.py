"""Measure what a training loop adds to each batch, over a bare PyTorch loop that trains the same batches in turns with
it.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import cycle
from pathlib import Path

import torch

from tests.benchmarks import loops
from tests.benchmarks.loops import Loop
from tests.benchmarks.table import show
from tests.benchmarks.turns import PERIOD, Bare, BareLoop, Cost, Turns, ready_made_batches

ROUNDS = 7
PERIODS = 60
LOOPS = {
    "the bare loop": loops.bare,
    "the bare loop, which counts and adds up the loss": loops.minimal,
    "hpc_det": loops.ours,
    "hpc_det without TensorBoard": loops.ours_without_tensorboard,
    "hpc_det with its DataLoader (bare: with torch's)": loops.ours_with_our_loader,
    **loops.others(),
}
HEADER = ("loop", "bare", "with it", "added", "added, with reports", "ratio, with reports (quartiles of rounds)")


def main() -> None:
    torch.set_num_threads(1)
    costs: dict[str, list[Cost]] = {name: [] for name in LOOPS}
    with tempfile.TemporaryDirectory() as root:
        for number in range(ROUNDS):
            for name, loop in LOOPS.items():
                costs[name].append(cost_of(loop, _bare_beside(loop), PERIODS, Path(root, f"{name} {number}")))
    show(
        f"one rank, {ROUNDS} rounds of {PERIODS} times 100 batches, microseconds a batch",
        HEADER,
        [row(name, rounds) for name, rounds in costs.items()],
    )


def _bare_beside(loop: Loop) -> BareLoop:
    own_data = loop is loops.ours_with_our_loader
    return BareLoop(loops.batches_of_torchs_loader() if own_data else cycle(ready_made_batches()))


def cost_of(loop: Loop, bare: Bare, periods: int, folder: Path, turn: int = PERIOD) -> Cost:
    """Return the cost of a loop. `folder`: a new folder for the files of the loop.

    Raises AssertionError if the loop's training differs from the bare one's.
    """
    gc.collect()
    taken = Turns(bare, periods, turn)
    with silence():
        weights = loop(taken, folder)
    assert torch.equal(weights.cpu(), bare.weights.cpu()), "the loops do not train the same"
    return taken.cost


@contextmanager
def silence() -> Iterator[None]:
    """Discard progress bars and warnings, as in a job without a terminal."""
    logging.disable(logging.ERROR)
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def row(name: str, rounds: list[Cost]) -> list[str]:
    """Return the medians of the rounds."""
    values = [(cost.bare_us, cost.measured_us, cost.added_us, cost.mean_added_us, cost.ratio) for cost in rounds]
    bare, measured, added, mean_added, ratios = zip(*values, strict=True)
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    median = statistics.median
    return [
        name,
        f"{median(bare):.1f}",
        f"{median(measured):.1f}",
        f"{median(added):+.1f}",
        f"{median(mean_added):+.1f}",
        f"{ratio:.3f} ({low:.3f}, {high:.3f})",
    ]


if __name__ == "__main__":
    main()
