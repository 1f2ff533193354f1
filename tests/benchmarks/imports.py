"""Measure what the imports of a rank ask of a file system, until its first step with AdamW.

`environment.bundle`, the faster inspect.getmodule and `environment.stage` are compared with plain imports. strace(1)
counts the calls, and adds a millisecond to each of them, as a busy file server would; of a program with a local copy
of the environment, to each that is not for a file of that copy. The weights after the step must be the same bits.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_det.launch.staged import staged
from hpc_det.node.import_bundle import VARIABLE
from hpc_det.submit.bundle import is_current, write_bundle
from hpc_det.submit.stage import is_current as is_current_archive
from hpc_det.submit.stage import write_archive
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
STAGED = {
    "`stage`, and `getmodule` from frames": FRAMES + TRAINS,
    "`stage` and both": BUNDLE + FRAMES + TRAINS,
    "`stage` and both, as a launcher before it forks": LAUNCHER + TRAINS,
}
"""Programs that run in a local copy of the environment."""
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
        programs = {name: Program(sys.executable, program, env) for name, program in PROGRAMS.items()}
        programs |= _staged_programs(Path(folder), env)
        weights = {program.run()[0] for program in programs.values()}
        assert len(weights) == 1, weights
        _show_calls(programs, Path(folder, "counts"))
        _show_times(programs)


@dataclass(frozen=True)
class Program:
    """A program until its first step."""

    python: str
    text: str
    env: dict[str, str]
    only: tuple[str, ...] = ()
    """The files and folders for which calls are counted and delayed; none: all."""

    def run(self, *tracer: str) -> tuple[str, float, float]:
        """Run the program; return its output, its CPU time and its elapsed time in seconds."""
        paths = [f"--trace-path={path}" for path in self.only] if tracer else []
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [*tracer, *paths, self.python, "-c", self.text]
        printed = subprocess.run(command, env=self.env, check=True, stdout=subprocess.PIPE, text=True).stdout
        after, elapsed_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
        return printed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed_s


def _staged_programs(folder: Path, env: dict[str, str]) -> dict[str, Program]:
    """Return the programs in a copy of the environment, made as on a node."""
    archive, began = folder / "private" / "all.tar", time.monotonic()
    written = write_archive(archive)
    wrote_s, began = time.monotonic() - began, time.monotonic()
    assert is_current_archive(archive)
    compared_s, began = time.monotonic() - began, time.monotonic()
    copy = staged(str(archive), str(folder), "benchmark")
    print(
        f"archive: {written.files} files, {written.size_bytes / 1e6:.0f} MB, written in {wrote_s:.1f} s, compared with "
        f"the files in {compared_s:.1f} s, unpacked in {time.monotonic() - began:.1f} s"
    )
    began = time.monotonic()
    staged(str(archive), str(folder), "benchmark")
    print(f"its copy is found to be complete in {time.monotonic() - began:.1f} s")
    python = copy + sys.executable.removeprefix(sys.prefix)
    programs = {name: Program(python, text, env) for name, text in STAGED.items()}
    return {name: replace(each, only=_outside(each, copy, folder / "trace")) for name, each in programs.items()}


def _outside(program: Program, copy: str, report: Path) -> tuple[str, ...]:
    """Return the paths outside of the copy that the program's calls name, or that their descriptors belong to."""
    program.run("strace", "-f", "-y", "-e", f"trace={DELAYED}", "-o", str(report))
    lines = report.read_text().splitlines()
    paths = {path for line in lines for path in re.findall(r'(?<=["<])/[^">]*', line.split(" = ")[0])}
    return tuple(sorted(path for path in paths if not path.startswith(copy)))


def _show_calls(programs: Mapping[str, Program], report: Path) -> None:
    rows = []
    for name, program in programs.items():
        counts, missing = _counts(program, report)
        numbers = (sum(counts.get(call, 0) for call in STATS), counts.get("openat", 0), counts.get("getdents64", 0))
        rows.append((name, *(f"{n:,}" for n in (*numbers, missing)), f"{sum(numbers) / 1000:.1f}"))
    header = ("", "stat", "open", "list a folder", "not found", "seconds at 1 ms for each call")
    show("Calls until the first step", header, rows)


def _counts(program: Program, report: Path) -> tuple[dict[str, int], int]:
    """Return how often each call was made, and how many failed."""
    program.run("strace", "-f", "-c", "--quiet=all", "-e", f"trace={DELAYED}", "-o", str(report))
    lines = [line.split() for line in report.read_text().splitlines()]
    rows = [words for words in lines if len(words) >= 5 and words[3].isdecimal() and words[-1] != "total"]
    failed = sum(int(words[4]) for words in rows if len(words) == 6)  # the column is empty if none failed
    return {words[-1]: int(words[3]) for words in rows}, failed


def _show_times(programs: Mapping[str, Program]) -> None:
    traced = ("strace", "-f", "--quiet=all", "-o", "/dev/null", "-e", f"trace={DELAYED}")
    slow = (*traced, "-e", f"inject={DELAYED}:delay_enter=1000")
    taken: dict[str, list[tuple[float, ...]]] = {}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            _, cpu_s, _ = program.run()
            _, _, traced_s = program.run(*traced)
            _, _, slow_s = program.run(*slow)
            taken.setdefault(name, []).append((cpu_s, traced_s, slow_s))
    rows = [
        (name, *(f"{statistics.median(column):.1f}" for column in zip(*rounds, strict=True)))
        for name, rounds in taken.items()
    ]
    header = ("", "CPU time", "under strace", "with 1 ms before each call")
    show(f"Seconds until the first step, median of {ROUNDS} rounds", header, rows)


if __name__ == "__main__":
    main()
