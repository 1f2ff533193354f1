"""The allocation of a job on three nodes: agents on all nodes, and nodes that fail and return."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.facts import unnamed
from tests.labs.slurm import SlurmLab
from tests.sgd.capacity.driver import Run
from tests.wait import wait_for

pytestmark = pytest.mark.slurm
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def run(slurm_lab: SlurmLab) -> Run:
    return Run.make(slurm_lab.folder() / "run of it's 100%")


def submit(lab: SlurmLab, run: Run, *flags: str) -> str:
    """Submit a job whose batch script is a driver and return its ID."""
    script = run.path / "job.sh"
    script.write_text(f'#!/bin/bash\nexec {sys.executable} -m tests.sgd.capacity.driver "$1"\n')
    where = ["--parsable", "--partition=low", "--no-kill", f"--chdir={REPOSITORY}", "--output=/dev/null"]
    return lab.run("sbatch", *where, *flags, str(script), str(run.path)).strip()


def stop(lab: SlurmLab, run: Run, job: str) -> None:
    """Stop the driver and wait until the job has completed."""
    run.hang_up()
    run.tell("stop")
    wait_for((run.path / "stopped").exists)
    lab.wait_for_state(job, "COMPLETED")


def test_agents_start_on_all_nodes_and_go_on_without_one_that_is_taken_away(slurm_lab: SlurmLab, run: Run) -> None:
    job = submit(slurm_lab, run, "--nodes=3", "--ntasks-per-node=2", "--cpus-per-task=2", "--gres=gpu:2")
    agents = run.wait_for_agents(3)
    assert [(note["host"], note["slots"]) for note in agents] == [("node1", 2), ("node2", 2), ("node3", 2)]
    assert (run.path / "capacity").read_text() == "10.66.0.11 6 True\n"
    assert run.logs()["node-node2.log"] == "here\n"
    slurm_lab.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=taken away")
    run.tell("renew node2")
    wait_for(lambda: unnamed(run.state(), f"job {job}", "node1, node3", "node2") == [], otherwise=run.state)
    wait_for(lambda: not is_there(agents[1]))
    assert [is_there(note) for note in agents] == [True, False, True]
    stop(slurm_lab, run, job)
    assert len(run.agents()) == 3


def test_an_agent_starts_again_where_it_was_killed_and_on_a_node_that_was_off(slurm_lab: SlurmLab, run: Run) -> None:
    job = submit(slurm_lab, run, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6")
    first, second = run.wait_for_agents(2)
    assert [first["slots"], second["slots"]] == [6, 6]  # without a GPU there is a rank for each CPU
    os.kill(first["pid"], signal.SIGKILL)
    run.tell(f"renew {first['host']}")
    run.wait_for_agents(3)
    number = int(second["host"].removeprefix("node"))
    slurm_lab.fail_node(number)
    slurm_lab.repair_node(number)
    run.tell(f"renew {second['host']}.its.domain")
    assert [note["host"] for note in run.wait_for_agents(4)] == [first["host"]] * 2 + [second["host"]] * 2
    stop(slurm_lab, run, job)


def is_there(note: dict[str, Any]) -> bool:
    return Path(f"/proc/{note['pid']}").exists()
