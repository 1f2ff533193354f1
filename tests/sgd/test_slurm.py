"""TorchTrainer on the nodes of a real Slurm: nodes fail, a pool grows, and a job is preempted and requeued."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_det.schedulers.slurm.scheduler import Slurm
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.slurm
REPOSITORY = Path(__file__).parents[2]

DRIVER = """
import logging, os, sys, time
from pathlib import Path
from hpc_det.sgd import TorchTrainer
from hpc_det.sgd.capacity import Pool
from tests.sgd.trained import Linear

logging.basicConfig(level="INFO")
folder, workers, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
executor = "allocation"
if "SLURM_JOB_ID" not in os.environ:
    one_each = {"slots_per_node": 1, "slurm_exclusive": True}
    executor = Pool("slurm", nodes=(1, 3), slurm_partition="low", **one_each)
with TorchTrainer(
    training_operator_cls=Linear, num_workers=workers, executor=executor, run=folder / "run", config={"*batch_size": 12}
) as trainer:
    for epoch in trainer.remaining(epochs):
        result = trainer.train()
        size = len(trainer.apply_all_workers(os.getpid))
        with (folder / "output").open("a") as file:
            file.write(f"{epoch} {size} {result['train_loss']!r}\\n")
        while (folder / f"wait-{size}").exists():
            time.sleep(0.05)
        if (folder / "stop").exists():
            break
"""


class DriverOutput:
    """The output of the driver: a line for each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self) -> list[list[str]]:
        path = self.folder / "output"
        return [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []

    def sizes(self) -> list[int]:
        return [int(line[1]) for line in self.lines()]

    def logs(self) -> str:
        return "\n".join(self.logs_with(""))

    def logs_with(self, word: str) -> list[str]:
        of_run = self.folder / "run" / "logs"  # a link, which rglob does not follow from above
        paths = sorted([*self.folder.rglob("*.log"), *of_run.rglob("*.log")])
        return [log for path in paths if word in (log := path.read_text(errors="replace"))]


def prepared(lab: SlurmLab, *, waits_with: int) -> DriverOutput:
    """Write the driver, which waits after each epoch on `waits_with` ranks until the test deletes a file."""
    folder = lab.folder()
    (folder / "driver.py").write_text(DRIVER)
    (folder / f"wait-{waits_with}").touch()
    return DriverOutput(folder)


def submitted(lab: SlurmLab, output: DriverOutput, nodes: int, epochs: int, *flags: str) -> str:
    """Submit a job whose batch script is the driver and return its ID."""
    script = output.folder / "job.sh"
    script.write_text(
        f"#!/bin/bash\nexec {sys.executable} {output.folder}/driver.py {output.folder} {nodes} {epochs}\n"
    )
    where = ["--parsable", "--partition=low", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    said = [
        f"--chdir={REPOSITORY}",
        f"--export=ALL,PYTHONPATH={REPOSITORY}",
        f"--output={output.folder}/job.log",
        "--open-mode=append",
    ]
    return lab.run("sbatch", *where, *said, *flags, str(script)).strip()


def is_up(lab: SlurmLab, name: str) -> bool:
    """Return whether the node is up, and resume it otherwise. Slurm refuses that if it has done so itself."""
    if "DOWN" not in lab.run("sinfo", "--noheader", f"--nodes={name}", "--format=%T").upper():
        return True
    with suppress(RuntimeError):
        lab.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
    return False


@pytest.mark.long
def test_a_node_that_loses_its_power_is_done_without_until_it_is_back(slurm_lab: SlurmLab) -> None:
    output = prepared(slurm_lab, waits_with=2)
    job = submitted(slurm_lab, output, 2, 100000, "--no-kill")
    wait_for(lambda: output.sizes() == [2], DEADLINE_S, output.logs)
    driver_host = slurm_lab.job(job)["BatchHost"]
    hosts = slurm_lab.run("scontrol", "show", "hostnames", slurm_lab.job(job)["NodeList"]).split()
    (other,) = [int(host.removeprefix("node")) for host in hosts if host != driver_host]
    slurm_lab.fail_node(other)
    (output.folder / "wait-2").unlink()
    wait_for(lambda: output.sizes()[-1] == 1, DEADLINE_S, output.logs)
    slurm_lab.repair_node(other)
    wait_for(lambda: output.sizes()[-1] == 2, DEADLINE_S, output.logs)
    losses = [float(line[2].removeprefix("np.float64(").removesuffix(")")) for line in output.lines()]
    assert losses[-1] < losses[0] / 2
    assert [int(line[0]) for line in output.lines()] == list(range(len(losses)))  # no epoch was lost or trained twice
    (output.folder / "stop").touch()
    slurm_lab.wait_for_state(job, "COMPLETED")


@pytest.mark.long
def test_a_pool_shrinks_with_nodes_that_are_down_and_grows_with_those_that_are_up(slurm_lab: SlurmLab) -> None:
    output = prepared(slurm_lab, waits_with=3)
    command = [sys.executable, str(output.folder / "driver.py"), str(output.folder), "3", "100000"]
    with open(output.folder / "driver.log", "wb") as log:
        driver = subprocess.Popen(
            command,
            env=os.environ | slurm_lab.env | {"PYTHONPATH": str(REPOSITORY)},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        wait_for(lambda: 3 in output.sizes(), DEADLINE_S, output.logs)
        for name in ("node2", "node3"):
            slurm_lab.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=taken away")
        (output.folder / "wait-3").unlink()
        wait_for(lambda: output.sizes()[-1] == 1, DEADLINE_S, output.logs)
        wait_for(lambda: all(is_up(slurm_lab, name) for name in ("node2", "node3")))
        wait_for(lambda: output.sizes()[-1] == 3, DEADLINE_S, output.logs)
        (output.folder / "stop").touch()
        assert driver.wait(DEADLINE_S) == 0, output.logs()
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not slurm_lab.run("squeue", "--noheader").split(), DEADLINE_S, output.logs)


def test_a_preempted_driver_and_its_ranks_come_back_and_lose_nothing(slurm_lab: SlurmLab) -> None:
    undisturbed = prepared(slurm_lab, waits_with=0)
    first = submitted(slurm_lab, undisturbed, 2, 4)
    slurm_lab.wait_for_state(first, "COMPLETED")
    output = prepared(slurm_lab, waits_with=2)
    job = submitted(slurm_lab, output, 2, 4, "--requeue")
    wait_for(lambda: output.sizes() == [2], DEADLINE_S, output.logs)
    slurm_lab.preempt(nodes=3, seconds=2)
    wait_for(lambda: len(output.logs_with("SIGTERM")) == 2, DEADLINE_S, output.logs)  # the log of an agent on each node
    (output.folder / "wait-2").unlink()
    wait_for(lambda: slurm_lab.job(job)["Restarts"] == "1", DEADLINE_S)
    slurm_lab.wait_for_state(job, "PENDING")
    Slurm().release(job, lambda command, **_: slurm_lab.run(*command))
    slurm_lab.wait_for_state(job, "COMPLETED")
    assert output.lines() == undisturbed.lines()
