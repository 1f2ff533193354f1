"""Measure everyday commands with 1,000 experiments and 10,000 trials on disk, as whole processes.

Unit: seconds of CPU time, which on an idle machine is their duration.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from hpc_det.view.experiments import SETTLES_S
from tests.benchmarks.command_line import HPC_DET
from tests.benchmarks.table import show
from tests.cli.many import make_world

ROUNDS = 7
COMMANDS = (
    ("--version",),
    ("experiment", "list"),
    ("experiment", "list", "--json"),
    ("experiment", "describe", "1"),
    ("experiment", "describe", "1", "--json"),
)
"""Experiment 1 is the search with 1,000 trials."""


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        os.environ["HPC_DET_ROOT"] = root
        make_world(Path(root))
        time.sleep(SETTLES_S)  # the index ignores younger files
        first = seconds(("experiment", "list"))
        taken: dict[tuple[str, ...], list[float]] = {command: [] for command in COMMANDS}
        for _ in range(ROUNDS):  # interleaved: noise of the machine affects all alike
            for command in COMMANDS:
                taken[command].append(seconds(command))
    show(
        f"1,000 experiments, 10,000 trials; {ROUNDS} rounds, seconds of a processor",
        ["Command", "min", "median", "max"],
        [
            ["the first `hpc-det experiment list`", *spread([first])],
            *([f"`hpc-det {' '.join(command)}`", *spread(times)] for command, times in taken.items()),
        ],
    )


def spread(times: list[float]) -> list[str]:
    return [f"{value:.2f}" for value in (min(times), sorted(times)[len(times) // 2], max(times))]


def seconds(command: tuple[str, ...]) -> float:
    """Return the seconds of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([HPC_DET, *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
