"""Measure saves of a gang of several nodes: the time until the commit, and the calls to the file system.

`python -m tests.benchmarks many_ranks`. Each rank saves a small file, as with the state of its generators, and rank 0 a
larger one. RANKS_NODES, RANKS_OF_A_NODE, RANKS_KB and RANKS_SAVES change the numbers.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.distributed.collectives import Distributed
from tests.benchmarks.table import show
from tests.distributed.ranks import run_on_ranks
from tests.file_calls import file_calls

NODES = int(os.environ.get("RANKS_NODES", 4))
OF_A_NODE = int(os.environ.get("RANKS_OF_A_NODE", 4))
KB = int(os.environ.get("RANKS_KB", 16))
SAVES = int(os.environ.get("RANKS_SAVES", 9))


def main() -> None:
    # Otherwise each rank imports torch itself.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.benchmarks.many_ranks"])
    with tempfile.TemporaryDirectory() as root:
        found = run_on_ranks(NODES * OF_A_NODE, measured, Path(root), nodes=NODES, deadline_s=300)
    times = [seconds for seconds, _, _ in found[0]][1:]
    show(
        f"{NODES} nodes of {OF_A_NODE} ranks, {KB} KB of each rank, {SAVES - 1} saves, seconds until the commit",
        ("min", "median", "max"),
        [(f"{min(times):.3f}", f"{statistics.median(times):.3f}", f"{max(times):.3f}")],
    )
    leaders, others = range(OF_A_NODE, len(found), OF_A_NODE), [r for r in range(len(found)) if r % OF_A_NODE]
    show(
        "calls of a rank in the last save: to the file system, and messages received from other ranks by rank 0",
        ("ranks", "calls", "messages", "which calls"),
        [
            (
                name,
                f"{statistics.mean(sum(found[r][-1][1].values()) for r in ranks):.1f}",
                f"{found[ranks[0]][-1][2]}",
                ", ".join(f"{call} {count}" for call, count in sorted(found[ranks[0]][-1][1].items())),
            )
            for name, ranks in (("rank 0", [0]), ("a first rank of a node", leaders), ("another rank", others))
        ],
    )


def measured(distributed: Distributed, root: Path) -> list[tuple[float, Counter[str], int]]:
    """Return seconds until the commit, calls to the file system and messages received, for each save of this rank."""
    context, found = CheckpointContext(root, distributed), []
    files = {f"rank-{distributed.rank}.pth": torch.zeros(KB * 256)}
    if distributed.is_chief:
        files["state_dict.pth"] = torch.zeros(1 << 18)
    for steps in range(SAVES):
        distributed.barrier()
        before, began = _received(distributed), time.perf_counter()
        with file_calls(root) as calls:
            context.begin(steps, files)
            context.settled(wait=True)
        found.append((time.perf_counter() - began, calls, _received(distributed) - before))
        context.prune({}, smaller_is_better=True, best=0, latest=1) if distributed.is_chief else None
    return found


def _received(distributed: Distributed) -> int:
    return sum(distributed.messages._arrivals.values())


if __name__ == "__main__":
    main()
