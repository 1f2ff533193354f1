"""Places an experiment on a cluster and plans its jobs: nodes, ranks, jobs, and how many jobs run at a time.

The functions are pure: the same input gives the same plan on every host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_det.config.entrypoint import TRIAL
from hpc_det.errors import UsageError, count
from hpc_det.plan.container import container, unmountable
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.resource_limits import memory_per_node
from hpc_det.store.folders import ExperimentFolder

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.schema import Experiment


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The nodes and ranks of a gang, or of a job's allocation."""

    nodes: int
    ranks_per_node: int


def rank_layout(slots: int, cluster: Cluster, path: str = "resources.slots_per_trial") -> RankLayout:
    """Return the nodes for `slots`, and the ranks on each.

    Determined schedules any number of slots within one node and only whole nodes beyond; a request that fits neither
    "waits indefinitely" there (its guide, *Scheduling Behavior*). This function raises UsageError instead, which names
    `path` and the nearest valid numbers. It also raises UsageError for more nodes than the cluster has.
    """
    per_node = cluster.slots_per_node
    if slots <= per_node:
        return RankLayout(nodes=1, ranks_per_node=slots)
    if cluster.max_nodes is not None and slots > cluster.max_nodes * per_node:
        raise UsageError(
            f"{path}: {slots} is more than cluster '{cluster.name}' has, {count(cluster.max_nodes, 'node')} "
            f"of {count(per_node, 'slot')}; use at most {cluster.max_nodes * per_node}"
        )
    if slots % per_node:
        low = slots - slots % per_node
        raise UsageError(
            f"{path}: {slots} does not fill whole nodes of {count(per_node, 'slot')} on cluster "
            f"'{cluster.name}'; use {low} or {low + per_node}"
        )
    return RankLayout(nodes=slots // per_node, ranks_per_node=per_node)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The jobs of an experiment: the layout of a gang and of a job, and the job arrays."""

    gang: RankLayout
    job: RankLayout
    """The allocation of one job."""
    arrays: tuple[JobArray, ...]

    @property
    def workers(self) -> int:
        return sum(array.workers for array in self.arrays)


def placement(experiment: Experiment, cluster: Cluster, trials: int, first: int = 0) -> Placement:
    """Return the jobs for `trials` trials, with workers numbered from `first`.

    Each trial gets a job, in arrays as long as the cluster allows. With `resources.packed_slots`, and without a queue,
    all trials share one allocation. Raises UsageError if the slots do not fit the cluster.
    """
    resources = experiment.resources
    shape = rank_layout(resources.slots_per_trial, cluster)
    at_once = _at_once(experiment, trials)
    shared = resources.packed_slots or (
        _slots_here(cluster, resources.slots_per_trial) if not cluster.has_queue else None
    )
    if shared is None:
        return Placement(gang=shape, job=shape, arrays=_arrays(trials, at_once, cluster.max_array_size, first))
    gangs = min(shared // resources.slots_per_trial, at_once)
    job = rank_layout(shared, cluster, "resources.packed_slots") if gangs > 1 else shape
    return Placement(gang=shape, job=job, arrays=(JobArray(first=first, count=1, workers_each=gangs),))


def _at_once(experiment: Experiment, trials: int) -> int:
    """Return the largest number of trials that may train at the same time; without a limit, all of them."""
    searcher, resources = experiment.searcher, experiment.resources
    limits = [trials, getattr(searcher, "max_concurrent_trials", 0) or trials]
    if resources.max_slots is not None:
        limits.append(max(resources.max_slots // resources.slots_per_trial, 1))
    return min(limits)


def _slots_here(cluster: Cluster, slots_per_trial: int) -> int:
    """Return the slots of one machine, rounded down to whole gangs, at least one gang."""
    return max(cluster.slots_per_node * (cluster.max_nodes or 1) // slots_per_trial, 1) * slots_per_trial


def _arrays(trials: int, at_once: int, longest: int, first: int) -> tuple[JobArray, ...]:
    """Return the arrays of `trials` jobs. With a limit on concurrent trials, they run in turn."""
    return tuple(
        JobArray(
            first=first + start,
            count=min(longest, trials - start),
            at_once=at_once if at_once < trials else None,
        )
        for start in range(0, trials, longest)
    )


def plan_jobs(
    experiment: Experiment,
    cluster: Cluster,
    folder: ExperimentFolder,
    place: Placement,
    *,
    python: str,
    startup_hook: bool = False,
    bundle: str = "",
    stage: str = "",
) -> JobPlan:
    """Return the plan. `cluster` is the profile in the experiment's pool. Raises UsageError for a folder that cannot be
    mounted.

    `bundle`: the path of the environment's bundle, which is in the plan if the experiment uses it. `stage`: that
    of the archive of the environment that the experiment uses; empty: none.
    """
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
        mem_per_node=memory_per_node(resources, place.job.ranks_per_node) or cluster.mem_per_node,
        constraint=resources.constraint,
        qos_resource=cluster.qos_resource,
        submit_args=tuple(_submit_args(experiment, cluster)),
        srun_args=tuple(cluster.srun_args),
        start_agents_with=cluster.start_agents_with,
        mpi_launcher=tuple(cluster.mpi_launcher),
        network_interface=cluster.dtrain_network_interface,
        grace_time_s=cluster.preemption_grace_s,
        resume=resume_mode(cluster, in_arrays=any(array.count > 1 for array in place.arrays))
        if cluster.has_queue
        else "requeue",
        chain_length=cluster.chain_length,
        health_checks=cluster.health_checks,
        exclude_nodes_for_min=cluster.exclude_nodes_for_min,
        hang_timeout_s=experiment.hang_timeout_s,
        modules=tuple(cluster.modules),
        setup=tuple(cluster.setup),
        container=box,
        startup_hook=startup_hook,
        nursery=experiment.launch.nursery,
        preload=tuple(experiment.launch.preload),
        bundle=bundle if experiment.environment.bundle and not box else "",
        stage=stage if not box else "",
        scratch=cluster.scratch,
    )


def resume_mode(cluster: Cluster, *, in_arrays: bool) -> str:
    """Return the `resume` mode of a job at this site, with `auto` resolved.

    A successor starts 1 s after the job before it; Slurm holds a requeued job for 2 min (measured), and PBS does not
    let users requeue their jobs.
    """
    # In arrays no jobs are queued in advance: one for each element would double the jobs in the queue.
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


def _argv(entrypoint: str | list[str], python: str) -> tuple[str, ...]:
    """Return the argument list of an entrypoint: a list is executed, a text is passed to `sh -c`, `module:Class` is a
    trial.

    These are Determined's forms.
    """
    if not isinstance(entrypoint, str):
        return tuple(entrypoint)
    if TRIAL.fullmatch(trial := entrypoint.strip()):
        return (python, "-m", "hpc_det.launch.direct", "--trial", trial)
    return ("/bin/sh", "-c", entrypoint)
