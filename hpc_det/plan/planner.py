"""Experiment + Cluster -> JobPlan. Pure: the same input gives the same plan on every host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpc_det.errors import UsageError
from hpc_det.plan.container import container, unmountable
from hpc_det.plan.job_plan import JobPlan
from hpc_det.plan.placement import Placement
from hpc_det.store.folders import ExperimentFolder

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.schema import Experiment

LEGACY_ENTRYPOINT = re.compile(r"[\w.]+:\w+")


def plan_jobs(
    experiment: Experiment, cluster: Cluster, folder: ExperimentFolder, place: Placement, *, python: str
) -> JobPlan:
    """`cluster` is the profile in the experiment's pool. Raises UsageError for a folder that cannot be mounted."""
    resources = experiment.resources
    box = container(experiment, cluster, str(folder.code))
    if box and (problems := list(unmountable("HPC_DET_ROOT", str(folder.path)))):
        raise UsageError(problems)
    return JobPlan(
        experiment_id=folder.id,
        name=experiment.name,
        scheduler=cluster.scheduler,
        folder=str(folder.path),
        code=str(folder.code),
        python=python,
        entrypoint=_argv(experiment.entrypoint, "python3" if box else python),
        environment=tuple(experiment.environment.variables(cluster.slot_type)),
        nodes=place.gang.nodes,
        ranks_per_node=place.gang.ranks_per_node,
        job_nodes=place.job.nodes,
        job_slots_per_node=place.job.ranks_per_node,
        slot_type=cluster.slot_type,
        cpus_per_rank=cluster.cpus_per_slot,
        max_restarts=experiment.max_restarts,
        max_attempts_without_progress=experiment.max_attempts_without_progress,
        partition=resources.resource_pool,
        account=cluster.account,
        qos=cluster.qos,
        priority=resources.priority,
        time_limit_min=resources.time_limit_min,
        signal_lead_s=cluster.signal_lead_s,
        gpu_flag=cluster.gpu_flag,
        gpu_type=cluster.gpu_type,
        mem_per_node=cluster.mem_per_node,
        submit_args=tuple(_submit_args(experiment, cluster)),
        srun_args=tuple(cluster.srun_args),
        start_agents_with=cluster.start_agents_with,
        mpi_launcher=tuple(cluster.mpi_launcher),
        network_interface=cluster.dtrain_network_interface,
        grace_time_s=cluster.preemption_grace_s,
        resume=way_back(cluster, in_arrays=any(array.count > 1 for array in place.arrays))
        if cluster.has_queue
        else "requeue",
        chain_length=cluster.chain_length,
        health_checks=cluster.health_checks,
        exclude_nodes_for_min=cluster.exclude_nodes_for_min,
        hang_timeout_s=experiment.hang_timeout_s,
        modules=tuple(cluster.modules),
        setup=tuple(cluster.setup),
        container=box,
        scratch=cluster.scratch,
    )


def way_back(cluster: Cluster, *, in_arrays: bool) -> str:
    """How a job of this site comes back into the queue, where the profile leaves that open.

    A successor starts 1 s after the job before it; Slurm holds a requeued job back for 2 min (measured), and PBS lets
    nobody requeue a job of their own. One for each element of an array would fill the queue twice.
    """
    if cluster.resume == "rerun" or (cluster.resume == "chain" and in_arrays):
        return "requeue"
    if cluster.resume != "auto":
        return cluster.resume
    match cluster.scheduler, cluster.nodes_can_submit, in_arrays:
        case "slurm", True, False:
            return "successor"
        case "pbs", True, _:
            return "resubmit" if in_arrays else "successor"
        case "pbs", False, False:
            return "chain"
    return "requeue"


def _submit_args(experiment: Experiment, cluster: Cluster) -> list[str]:
    by_scheduler = {"slurm": experiment.slurm.sbatch_args, "pbs": experiment.pbs.pbsbatch_args}
    return by_scheduler.get(cluster.scheduler, [])


def _argv(entrypoint: str | list[str] | tuple[str, ...], python: str) -> tuple[str, ...]:
    """Upstream's forms: a list is executed, a string goes to `sh -c`, `module:Class` is the legacy trial."""
    if not isinstance(entrypoint, str):
        return tuple(entrypoint)
    if LEGACY_ENTRYPOINT.fullmatch(entrypoint):
        return (python, "-m", "hpc_det.launch.direct", "--trial", entrypoint)
    return ("/bin/sh", "-c", entrypoint)
