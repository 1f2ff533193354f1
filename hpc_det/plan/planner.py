"""Experiment + Cluster -> JobPlan. Pure: the same input gives the same plan on every host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpc_det.errors import UsageError
from hpc_det.plan.in_container import container, unmountable
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
        partition=resources.resource_pool,
        account=cluster.account,
        qos=cluster.qos,
        time_limit_min=resources.time_limit_min,
        signal_lead_s=cluster.signal_lead_s,
        gpu_flag=cluster.gpu_flag,
        gpu_type=cluster.gpu_type,
        mem_per_node=cluster.mem_per_node,
        sbatch_args=tuple(experiment.slurm.sbatch_args),
        srun_args=tuple(cluster.srun_args),
        modules=tuple(cluster.modules),
        setup=tuple(cluster.setup),
        container=box,
        scratch=cluster.scratch,
    )


def _argv(entrypoint: str | list[str] | tuple[str, ...], python: str) -> tuple[str, ...]:
    """Upstream's forms: a list is executed, a string goes to `sh -c`, `module:Class` is the legacy trial."""
    if not isinstance(entrypoint, str):
        return tuple(entrypoint)
    if LEGACY_ENTRYPOINT.fullmatch(entrypoint):
        return (python, "-m", "hpc_det.launch.torch_distributed", "--trial", entrypoint)
    return ("/bin/sh", "-c", entrypoint)
