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
    write_json(record, {"environment": own, "hook": []})
    write_json(attempt.trial.launcher(attempt.number, 0), {"environment": {}, "hook": []})
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


@pytest.mark.integration
def test_a_task_sees_what_its_own_nodes_startup_hook_left_and_not_what_node_0s_did(tmp_path: Path) -> None:
    attempt = replace(ATTEMPT, folder=str(tmp_path), node_rank=0)
    first, second = (attempt.trial.launcher(attempt.number, node) for node in (0, 1))
    first.parent.mkdir()
    private = tmp_path / "private-of-node-1"
    private.mkdir()
    write_json(private / "hook-changes", ["BOTH", "GONE", "ONLY_1", "SLURM_PROCID"])
    (private / "hook-environment").write_bytes(b"BOTH=two\nlines\0ONLY_1=1\0ONLY_0=as before\0SLURM_PROCID=9\0")
    own = {"HPC_DET_NODE_RANK": "1", "HPC_DET_SOCKET": str(private / "agent")}
    write_json(first, {"environment": {}, "hook": ["BOTH", "ONLY_0", "NEVER_1"]})
    write_json(second, {"environment": own, "hook": []})
    slurm = {"SLURM_NODEID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
    of_node_0 = {"BOTH": "0", "GONE": "0", "ONLY_0": "0", "NEVER_1": "0", "OTHER": "0"}
    shown = subprocess.run(
        [sys.executable, "-m", "hpc_det.launch.launchers.rank", "srun", "env", "-0"],
        env=os.environ | attempt.to_env() | slurm | of_node_0,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = dict(item.split("=", 1) for item in shown.stdout.rstrip("\0").split("\0"))
    assert {name: seen.get(name) for name in (*of_node_0, "ONLY_1", "RANK")} == {
        "BOTH": "two\nlines",
        "GONE": None,
        "ONLY_0": "as before",
        "NEVER_1": None,
        "OTHER": "0",
        "ONLY_1": "1",
        "RANK": "5",
    }
