"""What a training loop adds to each batch, over a bare PyTorch loop that trains the same batches in turns with it."""

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

from tests.bench import loops
from tests.bench.loops import Loop
from tests.bench.table import show
from tests.bench.turns import BareLoop, Cost, Turns, ready_made_batches

ROUNDS = 7
TURNS = 60
LOOPS = {
    "hpc_det": loops.ours,
    "hpc_det without TensorBoard": loops.ours_without_tensorboard,
    "hpc_det with its DataLoader (bare: with torch's)": loops.ours_with_our_loader,
    **loops.others(),
}
HEADER = ("loop", "bare", "median batch", "added to it", "added to the mean", "ratio of turns (of rounds: min, max)")


def main() -> None:
    torch.set_num_threads(1)
    costs: dict[str, list[Cost]] = {name: [] for name in LOOPS}
    with tempfile.TemporaryDirectory() as root:
        for number in range(ROUNDS):
            for name, loop in LOOPS.items():
                costs[name].append(cost_of(loop, _bare_beside(loop), TURNS, Path(root, f"{name} {number}")))
    show(
        f"one rank, {ROUNDS} rounds of {TURNS} turns of 100 batches, microseconds a batch",
        HEADER,
        [row(name, rounds) for name, rounds in costs.items()],
    )


def _bare_beside(loop: Loop) -> BareLoop:
    own_data = loop is loops.ours_with_our_loader
    return BareLoop(loops.batches_of_torchs_loader() if own_data else cycle(ready_made_batches()))


def cost_of(loop: Loop, bare: BareLoop, turns: int, folder: Path) -> Cost:
    """`folder`: a new one for what the loop writes.

    Raises AssertionError where the loop trains something else than the bare one.
    """
    gc.collect()
    taken = Turns(bare, turns)
    with _silence():
        weights = loop(taken, folder)
    assert torch.equal(weights, bare.weights), "the loops do not train the same"
    return taken.cost


@contextmanager
def _silence() -> Iterator[None]:
    """Progress bars and advice go nowhere, as in a job whose output nobody reads."""
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
    """Medians of the rounds."""
    median = statistics.median
    ratios = [cost.ratio for cost in rounds]
    return [
        name,
        f"{median(cost.bare_us for cost in rounds):.1f}",
        f"{median(cost.measured_us for cost in rounds):.1f}",
        f"{median(cost.added_us for cost in rounds):+.1f}",
        f"{median(cost.mean_added_us for cost in rounds):+.1f}",
        f"{median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})",
    ]


if __name__ == "__main__":
    main()
