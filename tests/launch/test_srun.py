from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.launch.srun import step_command, step_flags
from hpc_det.node.json_files import write_json
from tests.facts import refused
from tests.plan.plans import job_plan
from tests.store.test_attempt import ATTEMPT


def test_one_step_lies_over_the_agents_nodes_and_shares_what_they_have() -> None:
    assert step_flags(job_plan(), {"SLURM_STEP_NODELIST": "node[1-2]"}) == [
        "--overlap",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=3",
        "--nodelist=node[1-2]",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--export=ALL",
    ]


def test_overrides_come_after_our_flags_and_before_the_rank() -> None:
    command = step_command(["true", "--mpi=pmi2"], job_plan(), ["--cpu-bind=none"])
    assert command[:3] == ["true", "--mpi=pmi2", "--overlap"]
    assert command[-5:] == ["--cpu-bind=none", sys.executable, "-m", "hpc_det.launch.launchers.rank", "srun"]


def test_without_slurm_the_launcher_says_so() -> None:
    with refused(UsageError, "srun-of-nobody", "command"):
        step_command(["srun-of-nobody"], job_plan(), [])


@pytest.mark.integration
def test_a_task_gets_its_numbers_from_srun_and_what_is_its_nodes_own_from_the_nodes_launcher(tmp_path: Path) -> None:
    attempt = replace(ATTEMPT, folder=str(tmp_path), node_rank=0)
    record = attempt.trial.launcher(attempt.number, 1)
    record.parent.mkdir()
    own = {"HPC_DET_NODE_RANK": "1", "HPC_DET_SOCKET": "/tmp/of-node-1", "TMPDIR": "/local"}
    write_json(record, {"environment": own})
    slurm = {"SLURM_NODEID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", *own]
    shown = subprocess.run(
        [sys.executable, "-m", "hpc_det.launch.launchers.rank", "srun", "printenv", *names],
        env=os.environ | attempt.to_env() | slurm,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == ["5", "8", "1", "4", "10.0.0.7", "1", "/tmp/of-node-1", "/local"]
