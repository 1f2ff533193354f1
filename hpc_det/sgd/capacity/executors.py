"""submitit's executors as jobs of node agents need them: an own copy, one task a node, that outlives a lost node."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity.starters import STEP_FLAGS

if TYPE_CHECKING:
    from submitit.core.core import Executor

NAME = "hpc-det-sgd"
_GPUS = ("gpus_per_node", "gpus_per_task", "num_gpus", "gres")
_COUNT = re.compile(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)")


def executor_of(given: Executor | str, nodes: int | None, parameters: Mapping[str, Any]) -> Executor:
    """For jobs of so many nodes; None: as many as it says itself.

    `given`: submitit's name of a cluster, "slurm" or "pbs", with the `parameters` that its AutoExecutor takes, or an
    executor, which is not changed. Raises UsageError for what submitit refuses.
    """
    try:
        made = _named(given, parameters) if isinstance(given, str) else _copied(given, parameters)
        _shape(made, nodes)
    except (NameError, ValueError, AssertionError, RuntimeError) as refused:
        raise UsageError(f"executor {shown_executor(given)}: {refused}") from None
    return made


def cluster_of(given: Executor | str) -> str:
    """By submitit's name."""
    return given if isinstance(given, str) else _inner(given).name()


def shown_executor(given: object) -> str:
    return repr(given) if isinstance(given, str) else type(given).__name__


def gpus_of(executor: Executor) -> int:
    """That its jobs have on each node."""
    given = next((executor.parameters[name] for name in _GPUS if executor.parameters.get(name)), 0)
    found = _COUNT.fullmatch(str(given))
    return int(found[1]) if found else 0


def cpus_of(executor: Executor) -> int:
    return int(executor.parameters.get("cpus_per_task") or 1)


def nodes_of(executor: Executor) -> int:
    return int(executor.parameters.get("nodes") or 1)


def _named(cluster: str, parameters: Mapping[str, Any]) -> Executor:
    from submitit import AutoExecutor

    auto = AutoExecutor(NAME, cluster=cluster)
    auto.update_parameters(**{"name": NAME, **parameters})
    return _inner(auto)


def _copied(given: Executor, parameters: Mapping[str, Any]) -> Executor:
    own = copy.deepcopy(given)
    if parameters:
        own.update_parameters(**parameters)
    return _inner(own)


def _inner(executor: Any) -> Executor:
    """AutoExecutor keeps the one of the cluster, whose parameters go by their own names."""
    found: Executor = getattr(executor, "_executor", executor)
    return found


def _shape(executor: Executor, nodes: int | None) -> None:
    generic = {"tasks_per_node": 1, **({"nodes": nodes} if nodes else {})}
    executor.update_parameters(**executor._convert_parameters(generic))
    if executor.name() == "pbs" and not executor.parameters.get("timeout_min"):
        raise ValueError("timeout_min: no time limit is set, and a job of submitit's on PBS has one")
    if executor.name() == "slurm":
        executor.parameters.setdefault("time", None)  # the site's default, instead of submitit's five minutes
        # A job that Slurm requeues and starts again while a node still runs its former self has that node drained
        # ("Duplicate jobid", measured): the driver submits another one instead.
        more = {"no-kill": True, "no-requeue": True, **(executor.parameters.get("additional_parameters") or {})}
        srun_args = [*(executor.parameters.get("srun_args") or []), *STEP_FLAGS]
        executor.update_parameters(additional_parameters=more, srun_args=srun_args)
