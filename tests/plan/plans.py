"""A default plan, of which each test changes only what matters to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpc_det.plan.job_plan import JobPlan

_PLAN = JobPlan(
    experiment_id=12,
    name="digits",
    scheduler="slurm",
    folder="/home/ada/hpc_det/experiments/12",
    code="/home/ada/hpc_det/experiments/12/code",
    python="/opt/venv/bin/python",
    entrypoint=("/opt/venv/bin/python", "train.py"),
    environment=(),
    nodes=2,
    ranks_per_node=4,
    job_nodes=2,
    job_slots_per_node=4,
    slot_type="gpu",
    cpus_per_rank=3,
    max_restarts=5,
    max_attempts_without_progress=5,
    partition=None,
    account=None,
    qos=None,
    priority=None,
    time_limit_min=None,
    signal_lead_s=90,
    gpu_flag="gpus-per-node",
    gpu_type=None,
    mem_per_node=None,
    submit_args=(),
    srun_args=(),
    start_agents_with="pbsdsh",
    mpi_launcher=("mpirun",),
    network_interface=None,
    grace_time_s=None,
    resume="requeue",
    chain_length=3,
    health_checks=True,
    exclude_nodes_for_min=1440,
    hang_timeout_s=None,
    modules=(),
    setup=(),
    container=None,
    scratch=None,
)


def job_plan(**changes: Any) -> JobPlan:
    """Return a plan for two nodes of four GPUs on Slurm, without optional settings, with these changes."""
    return replace(_PLAN, **changes)
