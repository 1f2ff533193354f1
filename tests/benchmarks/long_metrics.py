"""Measure commands with one trial whose metrics.jsonl has a million lines, as whole processes.

Units: seconds of CPU time, and MB of the largest process. One line in ten is a validation.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from pathlib import Path

from tests.benchmarks.command_line import HPC_DET
from tests.benchmarks.many import seconds, spread
from tests.benchmarks.table import show
from tests.cli.life import Life

LINES, ROUNDS = 1_000_000, 5
COMMANDS = (
    ("experiment", "list"),
    ("experiment", "describe", "1"),
    ("report", "1", "--json"),
    ("report", "1", "-o", "report.html"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        os.environ["HPC_DET_ROOT"] = root
        life = Life.submitted(Path(root))
        life.begins()
        write_lines(life.trial.metrics)
        life.finishes()
        os.chdir(root)
        rows = [[f"`hpc-det {' '.join(command)}`", *_measured(command, Path(root))] for command in COMMANDS]
    show(f"{LINES:,} lines; {ROUNDS} rounds", ["Command", "min", "median", "max", "MB"], rows)


def write_lines(path: Path) -> None:
    dice = random.Random(0)
    with path.open("a") as file:
        for steps in range(1, LINES):
            kind = "training" if steps % 10 else "validation"
            line = {"kind": kind, "steps": steps, "total": LINES, "metrics": {"loss": dice.random(), "accuracy": 0.5}}
            file.write(json.dumps({**line, "seconds": 0.01, "attempt": 1, "time": 1e9 + steps / 10}) + "\n")


def _measured(command: tuple[str, ...], root: Path) -> list[str]:
    times = []
    for _ in range(ROUNDS):
        (root / ".index.json").unlink(missing_ok=True)  # as for a running experiment
        times.append(seconds(command))
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    output = subprocess.check_output(["python3", "-c", code, str(HPC_DET), *command], text=True)
    return [*spread(times), f"{int(output) / 1000:.0f}"]


if __name__ == "__main__":
    main()
