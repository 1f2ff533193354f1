"""The lab behaves as a Slurm site does: what the end-to-end tests stand on, measured on the real thing."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.slurm import SCRIPTS, SlurmLab, parse_fields

slurm = pytest.mark.slurm

PREEMPTIBLE = """#!/bin/bash
#SBATCH --partition=low --nodes=3 --ntasks-per-node=1 --gpus-per-node=1 --output=job.log --open-mode=append
trap 'date +"batch TERM %s" >>signals' TERM
date +"start %s" >>signals
srun bash -c 'trap "date +\\"step TERM %s\\" >>signals" TERM; while :; do sleep 0.1; done' &
while :; do wait; done
"""

REQUEUES_ITSELF = """#!/bin/bash
#SBATCH --partition=low --output=job.log --open-mode=append
echo "run ${SLURM_RESTART_COUNT:-0}"
[[ ${SLURM_RESTART_COUNT:-0} == 1 ]] || scontrol requeue $SLURM_JOB_ID
"""


@slurm
def test_a_second_start_returns_at_once(slurm_lab: SlurmLab) -> None:
    before = time.monotonic()
    assert SlurmLab.start() == slurm_lab
    assert time.monotonic() - before < 1


@slurm
def test_each_node_has_its_own_name_address_and_tmp(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.folder()
    command = 'touch /tmp/of-$(hostname); echo $(hostname) $(hostname -I) $(cd /tmp; echo of-*) >$SLURM_PROCID'
    slurm_lab.run("srun", "--nodes=3", "bash", "-c", command, cwd=folder)
    assert sorted(path.read_text() for path in folder.iterdir()) == [
        "node1 10.66.0.11 of-node1\n",
        "node2 10.66.0.12 of-node2\n",
        "node3 10.66.0.13 of-node3\n",
    ]
    assert not Path("/tmp/of-node1").exists()


@slurm
def test_every_node_sees_the_checkout_and_the_python_of_the_tests(slurm_lab: SlurmLab) -> None:
    found = slurm_lab.run("srun", "--nodes=3", "ls", "-d", str(SCRIPTS), os.sys.executable, cwd=slurm_lab.folder())
    assert len(found.splitlines()) == 6


@slurm
def test_gpus_are_bound_to_their_step(slurm_lab: SlurmLab) -> None:
    seen = slurm_lab.run("srun", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES", cwd=slurm_lab.folder())
    assert seen == "0,1\n"
