"""Measure what TorchTrainer adds to a step of two ranks, over the same training as a bare loop under plain torchrun.

Both exist all the time, as does a second torchrun; they train in turns, so that the machine's noise affects all alike.
The second torchrun beside the first shows the resolution of the measurement.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch

from hpc_det.sgd import TorchTrainer
from tests.benchmarks.sgd_cases import CASES, RANKS, Case, Stepper, new_trainer, times_of
from tests.benchmarks.sgd_torchrun import torchrun
from tests.benchmarks.table import show
from tests.benchmarks.turns import Cost, Turn

GANGS, ROUNDS = 2, 10
"""Several gangs, since the speed differs between processes."""
HEADER = (
    "model",
    "torchrun",
    "TorchTrainer",
    "added",
    "ratio of means (quartiles)",
    "torchrun beside torchrun",
    "a call of train()",
)
Rounds = list[tuple[Cost, Cost]]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
    show(
        f"{RANKS} ranks, {GANGS} times {ROUNDS} rounds, microseconds a batch of rank 0, medians",
        HEADER,
        [_row(case) for case in CASES.values()],
    )


def _row(case: Case) -> list[str]:
    rounds: Rounds = []
    calls: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        for gang in range(GANGS):
            _measure(case, Path(root, str(gang)), rounds, calls)
    measured, themselves = zip(*rounds, strict=True)
    return [
        case.name,
        f"{statistics.median(cost.bare_us for cost in measured):.0f}",
        f"{statistics.median(cost.measured_us for cost in measured):.0f}",
        f"{statistics.median(cost.added_us for cost in measured):+.1f}",
        _quartiles(measured),
        _quartiles(themselves),
        f"{statistics.median(calls):+.0f}",
    ]


def _measure(case: Case, folder: Path, rounds: Rounds, calls: list[float]) -> None:
    folder.mkdir()
    with (
        torchrun(case.name, folder / "bare") as bare,
        torchrun(case.name, folder / "again") as again,
        new_trainer(Stepper, RANKS, config={"case": case.name}) as trainer,
    ):
        loops: list[Callable[[], Turn]] = [
            lambda: _microseconds(bare.train(case.turn)),
            lambda: _ours(trainer, case.turn, calls),
            lambda: _microseconds(again.train(case.turn)),
        ]
        _round(loops, 1)  # the first batches are not counted
        for _ in range(ROUNDS):
            bare_turns, our_turns, other_turns = _round(loops, case.turns)
            rounds.append((Cost(bare_turns, our_turns), Cost(bare_turns, other_turns)))
        ours = trainer.state_dict()["models"][0]
        assert torch.equal(bare.weights(), next(iter(ours.values()))), "they do not train the same"
        again.weights()


def _round(loops: list[Callable[[], Turn]], turns: int) -> list[list[Turn]]:
    """Train each loop in each turn; the first loop of a turn is the last of the next."""
    taken: list[list[Turn]] = [[] for _ in loops]
    for number in range(turns):
        for place in range(len(loops)):
            who = (place + number) % len(loops)
            taken[who].append(loops[who]())
    return taken


def _ours(trainer: TorchTrainer, steps: int, calls: list[float]) -> Turn:
    began = perf_counter()
    trainer.train(num_steps=steps)
    whole = perf_counter() - began
    times = trainer.apply_all_operators(times_of)[0]
    calls.append(1e6 * whole - (times[-1] - times[0]) / 1000)
    return _microseconds(times)


def _microseconds(times: list[int]) -> Turn:
    return [(after - before) / 1000 for before, after in pairwise(times)]


def _quartiles(costs: tuple[Cost, ...]) -> str:
    low, ratio, high = statistics.quantiles([cost.ratio for cost in costs], n=4, method="inclusive")
    return f"{ratio:.3f} ({low:.3f}, {high:.3f})"


if __name__ == "__main__":
    main()
