"""Experiments of benchmarks on the Slurm of tests/labs, with two slots of each node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from hpc_det.store.folders import ExperimentFolder
from tests.benchmarks.command_line import HPC_DET
from tests.labs.slurm import SlurmLab

PROFILE = (
    "{name: lab, scheduler: slurm, slots_per_node: 2, max_nodes: 3, slot_type: cpu, cpus_per_slot: 1,"
    " resource_pool: low}"
)


@contextmanager
def running_lab() -> Iterator[SlurmLab]:
    """Yield the lab; stop it afterwards unless it ran before."""
    was_running = SlurmLab.is_running()
    lab = SlurmLab.start()
    try:
        with lab.used_alone():
            yield lab
            lab.cancel_all()
    finally:
        if not was_running:
            lab.stop()


def run_experiment(lab: SlurmLab, config: str, name: str, code: str) -> ExperimentFolder:
    """Run an experiment until it ends, and return its folder.

    `config`: the text of its experiment file; `name`, `code`: the name and the text of its file of code.
    """
    root, folder = lab.folder(), lab.folder()
    (root / "conf" / "cluster").mkdir(parents=True)
    (root / "conf" / "cluster" / "lab.yaml").write_text(PROFILE)
    (folder / name).write_text(code)
    (folder / "config.yaml").write_text(config)
    command = [HPC_DET, "experiment", "create", f"{folder}/config.yaml", str(folder), "--cluster", "lab", "--follow"]
    environment = os.environ | lab.env | {"HPC_DET_ROOT": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (root / "experiments").iterdir()
    return ExperimentFolder(path)
