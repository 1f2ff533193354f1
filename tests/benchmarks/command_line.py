"""Measure everyday commands as whole processes, beside an interpreter that does nothing, and one that imports torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
HPC_DET = str(Path(sys.executable).with_name("hpc-det"))
EXPERIMENT = ["conf/experiment/digits.yaml", "docs/examples/digits"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "hpc-det --help": [HPC_DET, "--help"],
    "hpc-det experiment list": [HPC_DET, "experiment", "list"],
    "hpc-det experiment create --dry-run": [HPC_DET, "experiment", "create", *EXPERIMENT, "--dry-run"],
    "hpc-det run --dry-run": [HPC_DET, "run", "experiment=digits", "--dry-run"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
}


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        os.environ["HPC_DET_ROOT"] = root
        seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(ROUNDS):  # interleaved: noise of the machine affects all alike
            for name, command in COMMANDS.items():
                began = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - began)
    print(f"whole process, {ROUNDS} rounds        min     median  max [s]")
    for name, taken in seconds.items():
        print(f"{name:32} {min(taken):7.3f} {statistics.median(taken):7.3f} {max(taken):7.3f}")


if __name__ == "__main__":
    main()
