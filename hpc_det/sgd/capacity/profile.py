"""The gang job for a cluster profile, for programs that only pass the profile's name, as `executor="NAME"`."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping
from typing import Any

from hpc_det.config.cluster import Cluster
from hpc_det.config.conf_files import find
from hpc_det.config.fields import time_limit_min
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.errors import UsageError, count
from hpc_det.node.network import interfaces
from hpc_det.plan.effective import valid_profile
from hpc_det.plan.resource_limits import qos_problems
from hpc_det.schedulers.slurm.scheduler import gpu_flags
from hpc_det.sgd.capacity.allocation import Local
from hpc_det.sgd.capacity.job import GangJob

_log = logging.getLogger("hpc_det.sgd")
# Gigabytes per unit of mem_per_node. A number without a unit is in megabytes, as for sbatch --mem.
_GIGA = {"K": 1024**-2, "M": 1024**-1, "G": 1.0, "T": 1024.0}


def gang_job(
    name: str, env: Mapping[str, str], num_workers: int, cpus_per_worker: int, *, use_gpu: bool
) -> GangJob | Local:
    """Return a job for `num_workers` ranks on as few nodes as possible, or this machine for a local profile.

    `use_gpu`: whether ranks take GPUs, if the profile's slots are GPUs. Raises UsageError if the profile does not exist
    or is invalid, if it allows fewer nodes or CPUs than are needed, or if its scheduler cannot have what it requests.
    """
    profile = valid_profile(load_yaml(find("cluster", name, env)))
    cluster = profile.in_pool(profile.usual_pool).model_copy(update={"resource_pool": profile.usual_pool})
    if not use_gpu:
        cluster = cluster.model_copy(update={"slot_type": "cpu"})
    if cluster.scheduler == "local":
        return Local.of_gpus(env) if use_gpu else Local()
    slots = min(num_workers, cluster.slots_per_node)
    nodes = math.ceil(num_workers / slots)
    if cluster.max_nodes and nodes > cluster.max_nodes:
        raise UsageError(
            f"num_workers: {count(num_workers, 'worker')} need {count(nodes, 'node')} with {count(slots, 'slot')} "
            f"each, but cluster {cluster.name!r} allows {count(cluster.max_nodes, 'node')}; use at most "
            f"{count(cluster.max_nodes * cluster.slots_per_node, 'worker')}"
        )
    cpus, most_cpus = slots * max(cpus_per_worker, cluster.cpus_per_slot), cluster.max_cpus_per_node
    if most_cpus and cpus > most_cpus and cpus_per_worker > cluster.cpus_per_slot:
        raise UsageError(
            f"num_cpus_per_worker: {cpus_per_worker} for each of {count(slots, 'slot')} of a node are "
            f"{count(cpus, 'CPU')}, but cluster {cluster.name!r} allows {most_cpus} (max_cpus_per_node)"
        )
    made = GangJob(
        cluster.scheduler,
        nodes,
        slots_per_node=slots,
        interface=_if_here(cluster.dtrain_network_interface),
        cpus_per_task=cpus,
        **(_slurms(cluster, slots) if cluster.scheduler == "slurm" else _pbss(cluster, slots)),
    )
    # GangJob finds no GPUs that are requested by options of sbatch, as in slurm_additional_parameters.
    made.has_gpus = cluster.slot_type == "gpu"
    return made


def _slurms(cluster: Cluster, slots: int) -> dict[str, Any]:
    """Return the parameters of submitit's AutoExecutor for Slurm."""
    # submitit has no parameters for these flags, so they are passed under their own names.
    flags = [flag.removeprefix("--").split("=", 1) for flag in gpu_flags(cluster, slots)]
    memory = {"mem": cluster.mem_per_node} if cluster.mem_per_node else {}
    return {
        "slurm_partition": cluster.resource_pool,
        "slurm_account": cluster.account,
        "slurm_qos": cluster.qos,
        "slurm_signal_delay_s": cluster.signal_lead_s,
        "slurm_setup": _setup(cluster),
        "slurm_srun_args": list(cluster.srun_args),
        "slurm_additional_parameters": {**dict(flags), **memory},
        "timeout_min": time_limit_min(cluster.time_limit) if cluster.time_limit else None,
    }


def _pbss(cluster: Cluster, slots: int) -> dict[str, Any]:
    """Return the parameters of submitit's AutoExecutor for PBS. Raises UsageError without a time limit, and for a
    quality of service that PBS cannot have.
    """
    if problems := list(qos_problems(None, cluster)):
        raise UsageError(problems)
    limit = cluster.time_limit or cluster.max_time_limit
    if limit is None:
        raise UsageError(
            f"cluster {cluster.name!r}: neither time_limit nor max_time_limit is set, but submitit needs a limit for "
            f"jobs on PBS; set time_limit in the profile"
        )
    memory = cluster.mem_per_node
    return {
        "pbs_queue": cluster.resource_pool,
        "pbs_account": cluster.account,
        "pbs_signal_delay_s": cluster.signal_lead_s,
        "pbs_setup": _setup(cluster),
        "timeout_min": time_limit_min(limit),
        "gpus_per_node": slots if cluster.slot_type == "gpu" else None,
        "pbs_gpu_type": cluster.gpu_type if cluster.slot_type == "gpu" else None,
        "pbs_additional_parameters": {"l": f"{cluster.qos_resource}={cluster.qos}"} if cluster.qos else {},
        "mem_gb": memory and float(memory.rstrip("KMGT")) * _GIGA[memory[-1] if memory[-1] in _GIGA else "M"],
    }


def _setup(cluster: Cluster) -> list[str]:
    """Return the shell lines that run in the job before the agents: modules, setup, environment variables."""
    exports = (item.split("=", 1) for item in cluster.environment_variables)
    return [
        *(f"module load {shlex.quote(module)} || exit" for module in cluster.modules),
        *cluster.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in exports),
    ]


def _if_here(interface: str | None) -> str | None:
    """Return the interface if this machine has it, else None, so that the driver uses the route to the nodes."""
    # A login node, on which the driver may run, may lack the network that connects the compute nodes.
    if interface and interface not in interfaces():
        _log.info(
            "dtrain_network_interface: this host has no %s, so the driver listens on the route to the nodes", interface
        )
        return None
    return interface
