"""Measure what the imports of a rank ask of a file system, until its first step with AdamW.

`environment.bundle` and the faster inspect.getmodule are compared with plain imports. strace(1) counts the calls, and
adds a millisecond to each of them, as a busy file server would. The weights after the step must be the same bits.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpc_det.node.import_bundle import VARIABLE
from hpc_det.submit.bundle import is_current, write_bundle
from tests.benchmarks.table import show

ROUNDS = 3
TRAINS = """
import hashlib, torch
torch.manual_seed(3)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
print(hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""
BUNDLE = "import os; from hpc_det.node.import_bundle import import_from_bundle; import_from_bundle(os.environ)\n"
FRAMES = """\
from contextlib import ExitStack
from hpc_det.node.frame_modules import modules_from_frames
stack = ExitStack()
stack.enter_context(modules_from_frames())
"""
LAUNCHER = "from hpc_det.node.forking import import_all; import_all(['torch', 'torch._dynamo'])\n"
PROGRAMS = {
    "plain": TRAINS,
    "bundle": BUNDLE + TRAINS,
    "getmodule from frames": FRAMES + TRAINS,
    "both": BUNDLE + FRAMES + TRAINS,
    "both, as a launcher before it forks": LAUNCHER + TRAINS,
}
STATS = ("stat", "lstat", "newfstatat", "statx")
DELAYED = ",".join((*STATS, "openat", "getdents64"))
"""Calls of x86-64; those of the table of open files, such as close and read, cost a file server nothing or data."""


def main() -> None:
    if shutil.which("strace") is None:
        print("\nimports: strace is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "private", "all.bundle")
        began = time.monotonic()
        written = write_bundle(bundle)
        wrote_s, began = time.monotonic() - began, time.monotonic()
        assert is_current(bundle)
        print(
            f"\nbundle: {written.modules} modules, {written.size_bytes / 1e6:.0f} MB, written in {wrote_s:.1f} s, ",
            end="",
        )
        print(f"compared with the installed files in {time.monotonic() - began:.1f} s")
        env = {**os.environ, VARIABLE: str(bundle), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        weights = {_run(program, env)[0] for program in PROGRAMS.values()}
        assert len(weights) == 1, weights
        _show_calls(env, folder)
        _show_times(env)


def _show_calls(env: dict[str, str], folder: str) -> None:
    rows = []
    for name, program in PROGRAMS.items():
        counts, missing = _counts(program, env, Path(folder, "counts"))
        stats = sum(counts.get(call, 0) for call in STATS)
        rows.append((name, *(f"{n:,}" for n in (stats, counts["openat"], counts["getdents64"], missing))))
    show("Calls until the first step", ("", "stat", "open", "list a folder", "not found"), rows)


def _counts(program: str, env: dict[str, str], report: Path) -> tuple[dict[str, int], int]:
    """Return how often each call was made, and how many failed."""
    _run(program, env, "strace", "-f", "-c", "-e", f"trace={DELAYED}", "-o", str(report))
    lines = [line.split() for line in report.read_text().splitlines()]
    rows = [words for words in lines if len(words) >= 5 and words[3].isdecimal() and words[-1] != "total"]
    failed = sum(int(words[4]) for words in rows if len(words) == 6)  # the column is empty if none failed
    return {words[-1]: int(words[3]) for words in rows}, failed


def _show_times(env: dict[str, str]) -> None:
    traced = ("strace", "-f", "-o", "/dev/null", "-e", f"trace={DELAYED}")
    slow = (*traced, "-e", f"inject={DELAYED}:delay_enter=1000")
    taken: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(ROUNDS):
        for name, program in PROGRAMS.items():
            _, cpu_s, _ = _run(program, env)
            _, _, traced_s = _run(program, env, *traced)
            _, _, slow_s = _run(program, env, *slow)
            taken.setdefault(name, []).append((cpu_s, traced_s, slow_s, slow_s - traced_s))
    rows = [
        (name, *(f"{statistics.median(column):.1f}" for column in zip(*rounds, strict=True)))
        for name, rounds in taken.items()
    ]
    header = ("", "CPU time", "under strace", "with 1 ms before each call", "added by the delay")
    show(f"Seconds until the first step, median of {ROUNDS} rounds", header, rows)


def _run(program: str, env: dict[str, str], *tracer: str) -> tuple[str, float, float]:
    """Run the program; return its output, its CPU time and its elapsed time in seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [*tracer, sys.executable, "-c", program]
    printed = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    after, elapsed_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    return printed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed_s


if __name__ == "__main__":
    main()
