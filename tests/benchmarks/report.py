"""Measure the CPU time of the report of a thousand trials, as a whole process, and the size of its page."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.command_line import HPC_DET
from tests.report.searches import ADAPTIVE, HALVING, lived

TRIALS, WORKERS, ROUNDS = 1000, 64, 3
SEARCHERS: tuple[dict[str, Any], ...] = (HALVING, ADAPTIVE, {"name": "random"})


def main() -> None:
    print(f"report of {TRIALS} trials, {ROUNDS} rounds   min     median  max [CPU s] [MB]")
    for searcher in SEARCHERS:
        with tempfile.TemporaryDirectory() as folder:
            page, seconds = Path(folder, "report.html"), []
            experiment = lived(Path(folder), TRIALS, WORKERS, **searcher)
            for _ in range(ROUNDS):
                began = _of_children_s()
                command = [HPC_DET, "report", str(experiment.id), "-o", str(page)]
                env = os.environ | {"HPC_DET_ROOT": folder}
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
                seconds.append(_of_children_s() - began)
            numbers = f"{min(seconds):7.3f} {statistics.median(seconds):7.3f} {max(seconds):7.3f}"
            print(f"{searcher['name']:32} {numbers}   {page.stat().st_size / 1e6:7.1f}")


def _of_children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
