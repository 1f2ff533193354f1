"""The functions of the package `ray` that programs for RaySGD call: `ray.init` and the errors for tasks and actors.

Programs connect to no cluster: TorchTrainer starts its ranks itself, in the allocation of the job in which the
program runs, or on this machine.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity.starters import gpus_here

logger = logging.getLogger("ray")

_is_initialized = False
_OF_RAYS_LOGS = (
    "configure_logging",
    "ignore_reinit_error",
    "include_dashboard",
    "log_to_driver",
    "logging_format",
    "logging_level",
)
"""Arguments of `ray.init` that say nothing about where and on what a program runs."""


class NoTasks(UsageError, NotImplementedError):
    """The program uses tasks, actors or objects of Ray, which hpc_det does not have."""


def init(address: str | None = None, **options: Any) -> dict[str, Any]:
    """Do nothing but log the arguments about a cluster, because they have no effect. Return an empty dict.

    Args:
        address: The address of a Ray cluster, to which nothing connects.
        **options: Other arguments of `ray.init`, such as num_cpus.

    Raises:
        RuntimeError: `init` was called before, and neither `shutdown` since nor `ignore_reinit_error=True` now.
    """
    global _is_initialized
    if _is_initialized and not options.get("ignore_reinit_error"):
        raise RuntimeError("ray.init was called twice; call ray.shutdown() first, or pass ignore_reinit_error=True")
    _is_initialized = True
    asked = {"address": address, **options}
    given = [f"{name}={value!r}" for name, value in asked.items() if value is not None and name not in _OF_RAYS_LOGS]
    if given:
        logger.warning(
            "ray.init: %s: no effect; ranks run in the allocation of this job, else on this machine", ", ".join(given)
        )
    return {}


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not called since."""
    return _is_initialized


def shutdown() -> None:
    """Undo `init`. Trainers are not affected: `TorchTrainer.shutdown` ends their ranks."""
    global _is_initialized
    _is_initialized = False


def cluster_resources() -> dict[str, float]:
    """Return the numbers of CPUs and GPUs of this machine that this process may use: {"CPU": n, "GPU": m}.

    "GPU" is missing without GPUs, as in Ray.
    """
    gpus = len(gpus_here(os.environ))
    return {"CPU": float(len(os.sched_getaffinity(0))), **({"GPU": float(gpus)} if gpus else {})}


available_resources = cluster_resources


class RayClient:
    """The connection to a Ray server, which never exists."""

    def is_connected(self) -> bool:
        """Return False: models and files are on this machine."""
        return False


def remote(*args: Any, **options: Any) -> NoReturn:
    """Raise NoTasks, as do `get`, `put`, `wait` and `kill`."""
    _refuse("remote")


def get(*args: Any, **options: Any) -> NoReturn:
    """Raise NoTasks."""
    _refuse("get")


def put(*args: Any, **options: Any) -> NoReturn:
    """Raise NoTasks."""
    _refuse("put")


def wait(*args: Any, **options: Any) -> NoReturn:
    """Raise NoTasks."""
    _refuse("wait")


def kill(*args: Any, **options: Any) -> NoReturn:
    """Raise NoTasks."""
    _refuse("kill")


def _refuse(name: str) -> NoReturn:
    raise NoTasks(
        f"ray.{name}: hpc_det runs no tasks and actors of Ray; call the function directly, on all ranks with "
        f"TorchTrainer.apply_all_workers, or as a job with submitit (docs/how-to/port-from-raysgd.md)"
    )
