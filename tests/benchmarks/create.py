"""Measure `hpc-det experiment create` with a code folder of many files, beside `cp -r` of the same folder."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpc_det.config.entrypoint import Context
from hpc_det.submit.snapshot import copy_snapshot, snapshot_of
from tests.benchmarks.command_line import HPC_DET
from tests.benchmarks.table import show

FILES, PER_FOLDER, BYTES, ROUNDS = 20_000, 100, 2000, 5
EXPERIMENT = """\
name: copy
entrypoint: python3 train.py
searcher: {name: single, metric: loss, max_length: {batches: 1}}
hyperparameters: {global_batch_size: 1}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        code, config = root / "code", root / "experiment.yaml"
        fill(code)
        config.write_text(EXPERIMENT)
        env = {**os.environ, "HPC_DET_ROOT": str(root / "root")}
        create = [HPC_DET, "experiment", "create", str(config), str(code), "--paused"]
        ways: dict[str, Callable[[], object]] = {
            "`cp -r`": lambda: _run(["cp", "-r", str(code), str(root / "copy")], env),
            "scan and copy, in one process": lambda: copy_snapshot(snapshot_of(Context(code)), root / "copy"),
            "`hpc-det experiment create`": lambda: _run(create, env),
        }
        taken = rounds(ways, [root / "copy", root / "root"])
    base = taken["`cp -r`"]
    show(
        f"{FILES:,} files of {BYTES} bytes, {ROUNDS} rounds",
        ["what", "best [s]", "median [s]", "median / `cp -r` of the same round"],
        (
            [name, f"{min(each):.2f}", f"{statistics.median(each):.2f}", _ratio(each, base)]
            for name, each in taken.items()
        ),
    )


def fill(code: Path) -> None:
    """Write the code folder."""
    for number in range(FILES):
        path = code / f"package{number // PER_FOLDER}" / f"module{number}.py"
        if not number % PER_FOLDER:
            path.parent.mkdir(parents=True)
        path.write_bytes(b"#" * BYTES)
    (code / "train.py").write_text("")


def rounds(ways: dict[str, Callable[[], object]], made: list[Path]) -> dict[str, list[float]]:
    """Return the seconds of each way in each round; what it has made is deleted, and flushed, before the next."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):  # the first round fills the cache
        for name, act in ways.items():
            os.sync()
            began = time.perf_counter()
            act()
            if number:
                taken[name].append(time.perf_counter() - began)
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
    return taken


def _ratio(each: list[float], base: list[float]) -> str:
    return f"{statistics.median(one / other for one, other in zip(each, base, strict=True)):.2f}"


def _run(command: list[str], env: dict[str, str]) -> None:
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
