"""Capacities: the sources of node agents.

allocation       nodes that the driver already has: this machine, or the hosts of the job it is in
starters         the commands that start processes on the hosts of a job: srun, PBS' commands, mpiexec
job              jobs that are submitted through submitit and run node agents, and their states
driver_address   where the driver of such jobs listens
profile          a cluster profile as the parameters of such a job
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity.allocation import Allocation, Local
from hpc_det.sgd.capacity.job import GangJob, Pool
from hpc_det.sgd.capacity.starters import variable_of_allocation

if TYPE_CHECKING:
    from submitit.core.core import Executor

__all__ = ["Allocation", "Capacity", "GangJob", "Local", "Pool", "capacity_of"]


class Capacity(Protocol):
    """A source of nodes, used by the driver: it starts the node agents (hpc_det.sgd.elastic.node) and ends them."""

    @property
    def host(self) -> str:
        """The address on which the driver listens; 127.0.0.1 if all agents run on its own host."""

    @property
    def slots(self) -> int | None:
        """The largest number of ranks that can ever run; None: as many as requested."""

    @property
    def min_slots(self) -> int:
        """The number of slots below which the driver waits for more."""

    @property
    def has_queue(self) -> bool:
        """True if agents run in jobs that may wait in a queue for hours."""

    @property
    def has_gpus(self) -> bool:
        """True if each slot has a GPU."""

    def start(self, run: Path, wanted: int) -> None:
        """Start agents for `wanted` ranks, or submit jobs that do, and return at once. `run`: the run folder."""

    def renew(self, missing_hosts: Collection[str]) -> bool | None:
        """Start agents again that have ended; return whether any were started. Called about once a second while ranks
        are missing.

        `missing_hosts`: hosts whose agent had connected and was lost. A capacity that returns None counts no starts, so
        that the driver never gives up, and is not asked `has_ended`.
        """

    def has_ended(self) -> bool:
        """Return whether all agents that were started have ended, and none is in a queue."""

    def state(self) -> str:
        """Return one line of text about the agents or their jobs, for the message that agents are missing."""

    def is_suspended(self, job: str) -> bool:
        """Return whether the scheduler has suspended a job; `job`: its id in the environment of its processes."""

    def stop(self) -> None:
        """End the agents that still run, and wait for their end. Called after the driver has asked them to exit."""


def capacity_of(
    executor: str | Capacity | Executor | None,
    env: Mapping[str, str] | None = None,
    *,
    num_workers: int = 1,
    cpus_per_worker: int = 1,
    use_gpu: bool | Literal["auto"] = "auto",
) -> Capacity:
    """Return the capacity that the argument `executor` of TorchTrainer selects.

    None: the allocation that this process is in, if that has other hosts, else this machine. A string is "local",
    "allocation", or the name of a cluster profile, such as "slurm" or "pbs". An object is a Capacity or an executor of
    submitit. Raises UsageError for any other value.
    """
    env = os.environ if env is None else env
    if executor is None:
        return _found(env, cpus_per_worker, use_gpu)
    if executor == "local":
        return Local.of_gpus(env) if use_gpu else Local()
    if executor == "allocation":
        return Allocation(cpus_per_worker=cpus_per_worker, use_gpu=use_gpu, env=env)
    if isinstance(executor, str):
        from hpc_det.sgd.capacity.profile import gang_job

        return gang_job(executor, env, num_workers, cpus_per_worker, use_gpu=bool(use_gpu))
    given: Any = executor
    # Checked by method, not by class: Capacity is a protocol, and submitit is imported only when a job is submitted.
    if all(hasattr(given, name) for name in ("start", "renew", "state", "is_suspended", "stop")):
        return given  # type: ignore[no-any-return]
    if hasattr(given, "update_parameters"):
        return GangJob(given, cpus_per_worker=cpus_per_worker)
    raise UsageError(
        f"executor: got {executor!r}; expected 'local', 'allocation', the name of a cluster profile, an executor of "
        "submitit, or a Local, Allocation, GangJob or Pool of hpc_det.sgd.capacity"
    )


def _found(env: Mapping[str, str], cpus_per_worker: int, use_gpu: bool | str) -> Capacity:
    """Return the allocation that the environment describes if it has other hosts than this one, else this machine."""
    if variable_of_allocation(env):
        allocation = Allocation(cpus_per_worker=cpus_per_worker, use_gpu=use_gpu, env=env)
        if not allocation.is_this_host:
            return allocation
    return Local.of_gpus(env) if use_gpu else Local()
