"""Measure the control plane of a large gang: messages, file operations and CPU time per node and event.

Three parts, which SCALE_PARTS selects (`agents`, `star`, `nodes`; default all):

- agents: SCALE_AGENTS (default 512) real agents on this machine, without ranks, under the job's end of their lines.
- star: one process with as many authenticated connections as a gang has nodes, over loopback.
- nodes: a simulation of up to 4,096 nodes x 8 ranks with the costs that `star` measures, for the star and for a tree.
"""

from __future__ import annotations

import os

from tests.benchmarks import scale_events, scale_star

PARTS = {"agents": scale_events.main, "star": scale_star.main, "nodes": scale_star.simulation}


def main() -> None:
    for part in os.environ.get("SCALE_PARTS", ",".join(PARTS)).split(","):
        PARTS[part]()


if __name__ == "__main__":
    main()
