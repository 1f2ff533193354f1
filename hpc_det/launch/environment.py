"""The environment of an entrypoint: the job's, what the config asks for, and what ranks learn of their attempt."""

from __future__ import annotations

import os

from hpc_det import compat
from hpc_det.config.rank_variables import asks_for_compat
from hpc_det.node.network import limit_look_ups, variables
from hpc_det.plan.container_command import of_the_job
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Attempt


def environment_of(plan: JobPlan, attempt: Attempt, interface: str | None, scratch: str | None) -> dict[str, str]:
    """On this node. `interface`: of the network between the nodes; `scratch`: the node's folder, for temporary files.

    Into a container that the agent starts goes of the job's environment only what ranks need wherever they run.
    """
    is_inside = plan.container is not None and plan.container.starts_entrypoint
    given = of_the_job(os.environ) if is_inside else os.environ
    wanted = dict(item.split("=", 1) for item in plan.environment)
    environment = {**given, **({"TMPDIR": scratch} if scratch else {}), **wanted, **attempt.to_env()}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [plan.code, environment.get("PYTHONPATH")]))
    environment["HPC_DET_SLOT_TYPE"] = plan.slot_type
    if plan.slot_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # a node may have GPUs that this gang did not ask for
        environment.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed says on every rank that it has found no GPU
    if plan.container:  # runtimes show the home folder, and Python takes packages from it
        environment.setdefault("PYTHONNOUSERSITE", "1")
    environment.setdefault("OMP_NUM_THREADS", str(plan.cpus_per_rank))
    limit_look_ups(environment)
    if interface:
        environment = {**variables(interface), **environment}
    return compat.for_children(environment) if asks_for_compat(environment) else environment
