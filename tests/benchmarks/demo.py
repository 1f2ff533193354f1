"""Measure from the command of `make demo` to the first batch, beside an import of torch in the same round.

The import shows how fast the machine is meanwhile: it is most of the time of the command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import BEGINS, each
from tests.benchmarks.command_line import EXPERIMENT, HPC_DET
from tests.benchmarks.table import show

ROUNDS = 7
COMMAND = [HPC_DET, "experiment", "create", *EXPERIMENT, "--cluster", "local", "--follow"]
ONE_EPOCH = ["--config", "searcher.max_length.epochs=1"]
"""What follows the first batch is not measured."""


def main() -> None:
    taken = rounds(ROUNDS)
    imports, starts = zip(*taken, strict=True)
    ratios = [start / imported for imported, start in taken]
    show(
        f"{ROUNDS} rounds, seconds",
        ("", "min", "median", "max"),
        [
            ("`make demo`, from the command to the first batch", *_row(starts)),
            ("`python -c 'import torch'`, whole process", *_row(imports)),
            ("ratio in one round", *_row(ratios)),
        ],
    )


def rounds(number: int) -> list[tuple[float, float]]:
    """Return the seconds of the import and of the command, for each round after one that warms the machine."""
    return [(_torch(), _demo()) for _ in range(number + 1)][1:]


def _torch() -> float:
    began = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=_environment())
    return time.time() - began


def _demo() -> float:
    """Return the seconds from the command to the first batch."""
    with tempfile.TemporaryDirectory() as root:
        began = time.time()
        command = [*COMMAND, *ONE_EPOCH]
        subprocess.run(command, check=True, env=_environment() | {"HPC_DET_ROOT": root}, stdout=subprocess.DEVNULL)
        trial = ExperimentFolder(Path(root) / "experiments" / "1").trial(1)
        return float(next(report["time"] for report in each(trial.metrics) if report["kind"] == BEGINS)) - began


def _environment() -> dict[str, str]:
    """Return this process's environment, with compiled files of Python as the Makefile has them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _row(values: tuple[float, ...] | list[float]) -> list[str]:
    return [f"{of(values):.2f}" for of in (min, median, max)]


if __name__ == "__main__":
    main()
