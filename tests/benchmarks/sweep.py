"""Measure a sweep of a thousand points on a real Slurm: the time until the scheduler has it, and the calls of sbatch.

The comparison is the public submitit launcher for Hydra (extra `bench`), whose command blocks until all jobs have
ended: its time ends when the scheduler has the array.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.table import show
from tests.labs.slurm import SlurmLab, available

POINTS, ROUNDS = 1000, 3
HPC_DET = str(Path(sys.executable).with_name("hpc-det"))
PROFILE = "name: lab\nscheduler: slurm\nslots_per_node: 4\nslot_type: gpu\ngpu_flag: gres\nresource_pool: low\n"
EXPERIMENT = """# @package _global_
name: sweep
context_dir: {code}
entrypoint: python3 train.py
searcher: {{name: single, metric: loss}}
hyperparameters: {{x: 0}}
"""
APP = """
import hydra

@hydra.main(version_base="1.3", config_path=None)
def app(config):
    return 0

app()
"""
# Records the time of each call, and holds the jobs, which need not run.
SBATCH = '#!/bin/bash\ndate +%s.%N >>"{calls}"\nexec {sbatch} --hold "$@"\n'


def main() -> None:
    if reason := available():
        print(f"sweep: not measured: {reason}")
        return
    was_running = SlurmLab.is_running()
    lab = SlurmLab.start()
    try:
        _measure(lab)
    finally:
        lab.cancel_all()
        if not was_running:
            lab.stop()


def _measure(lab: SlurmLab) -> None:
    folder = lab.folder()
    env = _prepare(folder) | lab.env
    ours, theirs = [], []
    for _ in range(ROUNDS):  # in turns: the machine's noise affects both alike
        ours.append(_ours(folder, env))
        theirs.append(_theirs(folder, env) if find_spec("hydra_plugins.hydra_submitit_launcher") else None)
        lab.cancel_all()
    rows = [["hpc-det run -m", *_row([taken for taken in ours if taken])]]
    if measured := [taken for taken in theirs if taken]:
        rows.append(["the submitit launcher for Hydra", *_row(measured)])
    title = f"{POINTS:,} points on Slurm, whole process, {ROUNDS} rounds; the goal is under 1 s after the imports"
    show(title, ["", "min [s]", "median [s]", "max [s]", "calls of sbatch"], rows)


def _prepare(folder: Path) -> dict[str, str]:
    for group, name, text in (
        ("cluster", "lab", PROFILE),
        ("experiment", "sweep", EXPERIMENT.format(code=folder / "code")),
    ):
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / f"{name}.yaml").write_text(text)
    for needed in ("code", "bin", "app"):
        (folder / needed).mkdir()
    (folder / "code" / "train.py").write_text("pass\n")
    (folder / "app" / "app.py").write_text(APP)
    sbatch = folder / "bin" / "sbatch"
    sbatch.write_text(SBATCH.format(calls=folder / "calls", sbatch=shutil.which("sbatch")))
    sbatch.chmod(0o755)
    return {**os.environ, "HPC_DET_ROOT": str(folder), "PATH": f"{sbatch.parent}:{os.environ['PATH']}"}


def _ours(folder: Path, env: dict[str, str]) -> tuple[float, int]:
    """Return the seconds, and the number of calls of sbatch."""
    (folder / "calls").write_text("")
    command = [HPC_DET, "run", "-m", "cluster=lab", "experiment=sweep", f"hyperparameters.x=range(0,{POINTS})"]
    began = time.time()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.time() - began, len((folder / "calls").read_text().split())


def _theirs(folder: Path, env: dict[str, str]) -> tuple[float, int]:
    (folder / "calls").write_text("")
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=low", f"+x=range(0,{POINTS})"]
    began = time.time()
    with subprocess.Popen(
        [sys.executable, "app.py", "-m", *launcher], cwd=folder / "app", env=env, stdout=subprocess.DEVNULL
    ) as process:
        while not (calls := (folder / "calls").read_text().split()) and process.poll() is None:
            time.sleep(0.005)
        process.kill()
    return float(calls[0]) - began, len(calls)


def _row(taken: list[tuple[float, int]]) -> list[str]:
    seconds = [duration for duration, _ in taken]
    numbers = [f"{of(seconds):.2f}" for of in (min, statistics.median, max)]
    return [*numbers, "/".join(map(str, sorted({calls for _, calls in taken})))]


if __name__ == "__main__":
    main()
