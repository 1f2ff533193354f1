"""Measure the peak memory of a process that trains 2000 batches: a bare loop, and a trial with all features
of a run.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from tests.benchmarks.table import show

ROUNDS = 7
BATCHES = 2000
BARE = f"""
from itertools import cycle
from tests.benchmarks.turns import BareLoop, ready_made_batches
torch.set_num_threads(1)
BareLoop(cycle(ready_made_batches())).train({BATCHES})
"""
OURS = f"""
import tempfile
from pathlib import Path
from tests.benchmarks.loops import train_trial
from tests.benchmarks.turns import ready_made_batches
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    train_trial(Path(folder, "trial"), ready_made_batches(), {BATCHES}, tensorboard=%s)
"""
PEAK = """
import re
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
PROGRAMS = {
    "bare loop": BARE,
    "hpc_det": OURS % True,
    "hpc_det without TensorBoard": OURS % False,
}


def main() -> None:
    peaks: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS):
        for name, program in PROGRAMS.items():
            peaks[name].append(peak_mb(program))
    medians = {name: statistics.median(of) for name, of in peaks.items()}
    show(
        f"{BATCHES} batches, median of {ROUNDS} processes, MB",
        ("process", "peak", "added"),
        [(name, f"{peak:.1f}", f"{peak - medians['bare loop']:+.1f}") for name, peak in medians.items()],
    )


def peak_mb(program: str) -> float:
    """Return the peak memory of a new process, from the kernel (VmHWM of /proc/self/status, proc(5))."""
    command = [sys.executable, "-c", f"import torch\n{program}\n{PEAK}"]
    return int(subprocess.check_output(command, text=True).split()[-1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
