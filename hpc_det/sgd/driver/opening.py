"""Checks the arguments of TorchTrainer and fit, and forms the first gang from them.

All invalid arguments are reported at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from hpc_det.errors import count, nearest, shown
from hpc_det.sgd.capacity import Allocation, Capacity, Local
from hpc_det.sgd.driver.elastic import ElasticGang
from hpc_det.sgd.driver.experiment import Description
from hpc_det.sgd.driver.failures import exit_at_term
from hpc_det.sgd.driver.gang import RankGang
from hpc_det.sgd.driver.nodes import GangRequest, Nodes, Patience
from hpc_det.sgd.driver.recorded import RunRecord, begin_record
from hpc_det.sgd.operator.options import BATCH_SIZE, BadArgument, problems_of
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank import RankSettings
from hpc_det.store.run_folder import DriverRun

_log = logging.getLogger("hpc_det.sgd")

_FORMER = {
    "model_creator": "TrainingOperator.from_creators",
    "data_creator": "TrainingOperator.from_creators",
    "optimizer_creator": "TrainingOperator.from_creators",
    "scheduler_creator": "TrainingOperator.from_creators",
    "loss_creator": "TrainingOperator.from_creators",
    "data_loader_args": "the DataLoader that setup() gives to register_data",
    "apex_args": "register(..., apex_args=...) in setup()",
    "num_replicas": "num_workers",
    "batch_size": "config={BATCH_SIZE: ...}",
}
"""Arguments of earlier RaySGD releases, and their replacements."""


class FormerArgument(BadArgument, DeprecationWarning):
    """An argument of an earlier RaySGD release was given. Also a DeprecationWarning, which RaySGD raises."""


def check(known: Mapping[str, Any], others: Mapping[str, Any], names: list[str]) -> None:
    """Check the arguments of TorchTrainer's constructor.

    `known`: the values of the arguments to check; `others`: arguments that the constructor does not have; `names`: the
    names of all arguments that it has, for suggestions.

    Raises BadArgument with every problem, or its subclass FormerArgument if `others` contains an argument of an earlier
    RaySGD release.
    """
    former = [f"{name}: this argument of RaySGD was removed; use {_FORMER[name]}" for name in others if name in _FORMER]
    unknown = [
        f"{name}: no such argument; {nearest(name, names)}".strip("; ") for name in others if name not in _FORMER
    ]
    problems = [*_problems(**known), *former, *unknown]
    if problems:
        raise (FormerArgument if former else BadArgument)(problems)


def _problems(
    *,
    training_operator_cls: Any,
    config: dict[str, Any],
    num_workers: int,
    min_workers: int,
    num_cpus_per_worker: int,
    use_gpu: Any,
    backend: str,
    use_fp16: Any,
    use_tqdm: bool,
    scheduler_step_freq: Any,
) -> Iterator[str]:
    if not (isinstance(training_operator_cls, type) and issubclass(training_operator_cls, TrainingOperator)):
        yield f"training_operator_cls is {shown(training_operator_cls)}; give a subclass of TrainingOperator"
    if num_workers < 1:
        yield f"num_workers is {num_workers}; it must be at least 1"
    if not 1 <= min_workers <= max(num_workers, 1):
        yield f"min_workers is {min_workers}; it must be from 1 to num_workers, which is {num_workers}"
    if num_cpus_per_worker < 1:
        yield f"num_cpus_per_worker is {num_cpus_per_worker}; it must be at least 1"
    if use_gpu not in (True, False, "auto"):
        yield f"use_gpu is {shown(use_gpu)}; use True, False or 'auto'"
    if backend not in ("auto", "gloo", "nccl"):
        yield f"backend is {backend!r}; use 'auto', 'gloo' or 'nccl'"
    yield from problems_of(use_fp16, use_tqdm, scheduler_step_freq)
    if BATCH_SIZE in config and not config[BATCH_SIZE] >= num_workers:
        workers = count(num_workers, "worker")
        yield f"config[BATCH_SIZE] is {config[BATCH_SIZE]} for {workers}; each needs at least one sample"


def on_devices(
    capacity: Capacity, *, use_gpu: bool | Literal["auto"], timeout_s: float, backend: str = "auto"
) -> dict[str, Any]:
    """Return `use_gpu`, `backend` and `timeout_s` for RankSettings.

    Raises BadArgument for `use_gpu=True` or NCCL without GPUs.
    """
    has_gpus = capacity.has_gpus if use_gpu == "auto" else use_gpu
    if has_gpus and _lacks_gpus(capacity):
        raise BadArgument(
            "use_gpu is True, but the ranks would have no GPU on this machine or in this job; use 'auto' or False, or "
            "a machine, a job or an executor with GPUs"
        )
    if backend == "nccl" and not has_gpus:
        raise BadArgument("backend is 'nccl', but the ranks have no GPU; use 'auto', or an executor with GPUs")
    return {
        "use_gpu": has_gpus,
        "backend": "nccl" if has_gpus and backend != "gloo" else "gloo",
        # RaySGD too reads this variable if the ranks use GPUs.
        "timeout_s": float(os.environ.get("NCCL_TIMEOUT_S", timeout_s)) if has_gpus else timeout_s,
    }


def _lacks_gpus(capacity: Capacity) -> bool:
    """Return whether it is certain that the ranks would have no GPUs."""
    # Other capacities submit jobs, whose GPUs may be requested in a way that only the scheduler understands. CUDA is
    # asked as well, because the GPUs of this machine may be of another make, or unknown to the scheduler.
    is_known = isinstance(capacity, (Local, Allocation))
    return is_known and not capacity.has_gpus and not torch.cuda.is_available()


def wanted_of(
    capacity: Capacity,
    *,
    num_workers: int,
    min_workers: int,
    settings: Callable[[int], RankSettings],
    hook: Callable[[], None] | None,
    is_here: bool = False,
) -> GangRequest:
    """Return the request for a gang of `min_workers` to `num_workers` ranks, limited to the slots of the capacity.

    `is_here`: rank 0 runs in this process. Raises BadArgument if there can be fewer slots than `min_workers`.
    """
    slots = num_workers if capacity.slots is None else capacity.slots + is_here
    if slots < min_workers:
        raise BadArgument(
            f"min_workers is {min_workers}, but there are slots for {count(slots, 'rank')} at most; request more "
            "nodes or GPUs"
        )
    if slots < num_workers:
        _log.warning(
            "num_workers is %d, but there are slots for %d ranks at most: that many will run", num_workers, slots
        )
    return GangRequest(
        most=min(num_workers, slots),
        least=max(min_workers, min(capacity.min_slots, num_workers)),
        is_here=is_here,
        settings=settings,
        hook=hook,
    )


def opened(
    run: DriverRun,
    capacity: Capacity,
    patience: Patience,
    wanted: GangRequest,
    about: Description,
    *,
    is_durable: bool,
    is_loop: bool = False,
) -> ElasticGang:
    """Start the capacity, form the first gang, and return it. The run gets an experiment, unless it has one.

    `about`: what the experiment shows.

    If that fails, ranks and agents are ended, and a temporary run is removed. `is_durable`: whether snapshots are also
    written to disk; `is_loop`: the gang runs a training loop of `fit`.
    """
    if run.is_temporary:  # other runs need no clean-up at SIGTERM: a restarted program continues them
        exit_at_term()
    try:
        gang = RankGang(Nodes(run.folder, capacity, patience), patience.hang_timeout_s)
        record = RunRecord()
        try:
            record = begin_record(run, about, is_of_loop=is_loop)
            gang.nodes.generation = record.last_attempt
            if wanted.is_here:
                gang.live_here()
            if wanted.most > wanted.is_here:
                gang.nodes.start(wanted.most - wanted.is_here)
            elastic = ElasticGang(gang, wanted, is_durable, record)
            elastic.start()
        except BaseException as error:  # also a Ctrl-C
            try:
                gang.end()
            finally:
                gang.nodes.close()
                record.end(error)
            raise
    except BaseException:
        run.remove_if_temporary()
        raise
    return elastic
