"""Measure the load on the shared folder by thousands of nodes that wait for node 0, and the time until all of them
continue.

Nodes are simulated: each looks at the times that `pauses` gives. The cost of a look is measured.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_det.node.network import await_rendezvous, pauses, publish
from hpc_det.store.folders import TrialFolder
from tests.benchmarks.table import show

NODES = (64, 512, 4096)
APART_S, LATE_S = 2.0, 10.0
"""Nodes start within the first number of seconds; node 0 publishes after the second number."""


def main() -> None:
    files, look_s = measured()
    rows = []
    for nodes in NODES:
        looks = [list(looks_of(random.uniform(0, APART_S))) for _ in range(nodes - 1)]
        total, last = sum(map(len, looks)), max(times[-1] for times in looks)
        busiest = max(sum(second <= t < second + 1 for times in looks for t in times) for second in range(int(LATE_S)))
        rows.append([str(nodes), str(files), f"{total / nodes:.1f}", str(busiest), f"{last - LATE_S:.2f}"])
    show(
        f"Nodes that wait {LATE_S:.0f} s for node 0; a look takes {1e6 * look_s:.0f} us here",
        ["nodes", "files in the folder", "looks of a node", "looks in the busiest second", "last one knows after [s]"],
        rows,
    )


def looks_of(begin: float) -> Iterator[float]:
    """Yield the times at which a node looks that starts at `begin`, until it has seen what node 0 published."""
    now = begin
    for pause in pauses():
        yield now
        if now >= LATE_S:
            return
        now += pause


def measured() -> tuple[int, float]:
    """Return the number of files that an attempt has for its rendezvous, and the seconds of a look."""
    with tempfile.TemporaryDirectory() as folder:
        path = TrialFolder(Path(folder)).rendezvous(1)
        publish(path, "10.0.0.7")
        began = time.perf_counter()
        for _ in range(1000):
            await_rendezvous(path, 1)
        return len(os.listdir(path.parent)), (time.perf_counter() - began) / 1000


if __name__ == "__main__":
    main()
