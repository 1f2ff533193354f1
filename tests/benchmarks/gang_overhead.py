"""Measure `loop_overhead` on two ranks of this machine, beside a bare loop with DistributedDataParallel on gloo."""

from __future__ import annotations

import functools
import os
import tempfile
from itertools import cycle
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from hpc_det.distributed.collectives import Distributed
from tests.benchmarks import loops
from tests.benchmarks.loop_overhead import HEADER, cost_of, row
from tests.benchmarks.table import show
from tests.benchmarks.turns import BareLoop, Cost, ready_made_batches
from tests.distributed.ranks import run_on_ranks

RANKS = 2
ROUNDS, ROUNDS_OF_OTHERS = 60, 8
"""Many short rounds: the speed differs between process groups."""
PERIODS, TURN = 6, 10
DEADLINE_S = 3600


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        costs, _ = run_on_ranks(RANKS, costs_on_a_rank, Path(root), deadline_s=DEADLINE_S)
    show(
        f"{RANKS} ranks, {ROUNDS} rounds (others {ROUNDS_OF_OTHERS}) of {PERIODS} times 100 batches, microseconds a "
        f"batch of rank 0",
        HEADER,
        [row(name, rounds) for name, rounds in costs.items()],
    )


def costs_on_a_rank(distributed: Distributed, root: Path) -> dict[str, list[Cost]]:
    os.environ.update(TORCHELASTIC_RUN_ID="bench", GROUP_RANK="0")  # as torchrun sets them
    costs: dict[str, list[Cost]] = {}
    for number in range(ROUNDS):
        others = loops.others() if number < ROUNDS_OF_OTHERS else {}
        for name, loop in {"the bare loop": loops.bare, "hpc_det": loops.ours, **others}.items():
            bare = BareLoop(cycle(ready_made_batches()), DistributedDataParallel)
            on_this_rank = functools.partial(loop, distributed=distributed)
            costs.setdefault(name, []).append(cost_of(on_this_rank, bare, PERIODS, root / f"{name} {number}", TURN))
    return costs


if __name__ == "__main__":
    main()
