"""Measure what our loop adds to each batch of a DeepSpeed engine, over a bare script with the same engine that trains
in turns with it: on one rank, and on two ranks of this machine over gloo.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import tempfile
from pathlib import Path

from hpc_det.distributed.collectives import Distributed
from tests.benchmarks.engines import BareEngine, Case, bare, ours
from tests.benchmarks.loop_overhead import cost_of, silence
from tests.benchmarks.table import show
from tests.benchmarks.turns import Cost
from tests.distributed.ranks import PRELOAD, run_on_ranks

CASES = [
    Case("ZeRO 0"),
    Case("ZeRO 0, accumulation 4", accumulation=4),
    Case("ZeRO 2", stage=2),
    Case("ZeRO 2, accumulation 4", stage=2, accumulation=4),
]
PIPELINE = Case("pipeline, 2 stages, accumulation 4", accumulation=4, is_pipeline=True)
ROUNDS = 20
PERIODS, TURN = 5, 10
DEADLINE_S = 600
HEADER = ("engine", "bare", "added to it", "ratio, with reports (quartiles)", "the bare script beside itself")


def main() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    for ranks, cases in ((1, CASES), (2, [*CASES, PIPELINE])):
        show(
            f"ranks: {ranks}; {ROUNDS} rounds of {PERIODS} times 100 batches, microseconds a batch of rank 0",
            HEADER,
            [_row(case, ranks) for case in cases],
        )


def _row(case: Case, ranks: int) -> list[str]:
    """Measure each round in new processes, since the speed differs between processes."""
    rounds: list[tuple[Cost, Cost]] = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as root:
            rounds.append(run_on_ranks(ranks, costs_on_a_rank, case, Path(root), number, deadline_s=DEADLINE_S)[0])
    measured, themselves = zip(*rounds, strict=True)
    low, ratio, high = _quartiles(measured)
    none_low, none, none_high = _quartiles(themselves)
    return [
        case.name,
        f"{statistics.median(cost.bare_us for cost in measured):.0f}",
        f"{statistics.median(cost.added_us for cost in measured):+.1f}",
        f"{ratio:.3f} ({low:.3f}, {high:.3f})",
        f"{none:.3f} ({none_low:.3f}, {none_high:.3f})",
    ]


def _quartiles(costs: tuple[Cost, ...]) -> list[float]:
    return statistics.quantiles([cost.ratio for cost in costs], n=4, method="inclusive")


def costs_on_a_rank(distributed: Distributed, case: Case, root: Path, number: int = 0) -> tuple[Cost, Cost]:
    """Return the costs of our loop and of the bare script, both beside the bare script; the order alternates."""
    costs: dict[str, Cost] = {}
    for loop in (ours, bare) if number % 2 else (bare, ours):
        measured = functools.partial(loop, case, distributed=distributed)
        name = loop.__name__
        with silence():
            beside = BareEngine(case, distributed)
        costs[name] = cost_of(measured, beside, PERIODS, root / name, TURN)
    return costs["ours"], costs["bare"]


if __name__ == "__main__":
    main()
