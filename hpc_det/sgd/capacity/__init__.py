"""Where node agents come from.

allocation   what the driver has already: this machine, or the job that it runs in
starters     how processes start on its hosts: srun, PBS' commands, mpiexec
job          jobs of their own through submitit, and how they stand in the queue; they run hpc_det.sgd.elastic.agents
profile      a cluster's profile as parameters of such a job
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
    """Runs in the driver, and starts on nodes what connects to it: hpc_det.sgd.elastic.node."""

    @property
    def host(self) -> str:
        """The address on which the driver listens; 127.0.0.1 where all agents run on its own host."""

    @property
    def slots(self) -> int | None:
        """The most ranks that can ever run; None: as many as asked for."""

    @property
    def min_slots(self) -> int:
        """With fewer the driver waits."""

    @property
    def has_queue(self) -> bool:
        """Whether agents may take hours to come."""

    @property
    def has_gpus(self) -> bool:
        """Whether there is a GPU for each slot."""

    def start(self, run: Path, wanted: int) -> None:
        """Start agents for `wanted` ranks, or submit the job that does. Returns at once."""

    def renew(self, missing_hosts: Collection[str]) -> None:
        """Called about once a second while ranks are missing. Starts agents again where some have ended.

        `missing_hosts`: where an agent had arrived, and is gone.
        """

    def state(self) -> str:
        """In one line, why agents may be missing."""

    def is_suspended(self, job: str) -> bool:
        """Whether the scheduler has suspended the job, by the id that the environment of its processes says."""

    def stop(self) -> None:
        """Called once the driver has hung up, so that agents leave. Ends what has not, and waits until it is gone."""


def capacity_of(
    executor: str | Capacity | Executor | None,
    env: Mapping[str, str] | None = None,
    *,
    num_workers: int = 1,
    cpus_per_worker: int = 1,
    use_gpu: bool | Literal["auto"] = "auto",
) -> Capacity:
    """What TorchTrainer's `executor` means.

    None: the allocation that this process runs in, where that has other hosts; otherwise this machine. A name is
    "local", "allocation", or that of a cluster profile, "slurm" and "pbs" among them. Raises UsageError for all else.
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
    if all(hasattr(given, name) for name in ("start", "renew", "state", "is_suspended", "stop")):
        return given  # type: ignore[no-any-return]
    if hasattr(given, "update_parameters"):
        return GangJob(given, cpus_per_worker=cpus_per_worker)
    raise UsageError(
        f"executor: got {executor!r}; expected 'local', 'allocation', the name of a cluster profile, an executor of "
        "submitit's, or one of hpc_det.sgd.capacity's Local, Allocation, GangJob, Pool"
    )


def _found(env: Mapping[str, str], cpus_per_worker: int, use_gpu: bool | str) -> Capacity:
    if variable_of_allocation(env):
        allocation = Allocation(cpus_per_worker=cpus_per_worker, use_gpu=use_gpu, env=env)
        if not allocation.is_this_host:
            return allocation
    return Local.of_gpus(env) if use_gpu else Local()
