"""Measure the first batch of 100 million shuffled records, and the first batch after a resume in mid-epoch."""

from __future__ import annotations

import statistics
import subprocess
import sys

from tests.benchmarks.table import show

ROUNDS = 3
RECORDS, BATCH = 100_000_000, 32
MIDDLE = RECORDS // 2 // BATCH * BATCH
DATA = f"""
import re, time
from itertools import islice
import torch
class Records(torch.utils.data.Dataset):
    def __len__(self):
        return {RECORDS}
    def __getitem__(self, number):
        return number
def memory(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
OURS = """
from hpc_det.pytorch import DataLoader
from hpc_det.core.progress import Position
from hpc_det.pytorch.data import training_data
def first_batch(done):
    data = training_data(DataLoader(Records(), {batch}, shuffle=True), rank=0, size=1, seed=1)
    return next(data.batches(Position(0, done)))
"""
TORCH = """
def first_batch(done):
    sampler = torch.utils.data.DataLoader(Records(), {batch}, shuffle=True).batch_sampler
    return torch.tensor(next(islice(sampler, done // {batch}, None)))
"""
MEASURED = """
torch.set_num_threads(1)
before, began = memory("VmRSS"), time.perf_counter()
assert len(first_batch({done})) == {batch}
print(time.perf_counter() - began, max(memory("VmHWM") - before, 0) * 1024 / 1e6)
"""
STARTS = {
    "hpc_det, first batch": (OURS, 0),
    "hpc_det, resume in the middle": (OURS, MIDDLE),
    "torch, first batch": (TORCH, 0),
    "torch, batches before the middle left out": (TORCH, MIDDLE),
}


def main() -> None:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for _ in range(ROUNDS):
        for name, (program, done) in STARTS.items():
            taken[name].append(seconds_and_mb(program, done))
    show(
        f"{RECORDS} shuffled records, median of {ROUNDS} processes",
        ("start", "seconds", "memory at the peak, more MB"),
        [(name, *(f"{statistics.median(of):.3g}" for of in zip(*each, strict=True))) for name, each in taken.items()],
    )


def seconds_and_mb(program: str, done: int) -> tuple[float, float]:
    """Measure in a new process, without imports."""
    text = (DATA + program + MEASURED).format(batch=BATCH, done=done)
    seconds, megabytes = subprocess.check_output([sys.executable, "-c", text], text=True).split()
    return float(seconds), float(megabytes)


if __name__ == "__main__":
    main()
