"""What TorchTrainer was asked for: every mistake at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_det.errors import nearest, shown
from hpc_det.sgd.operator.constants import BATCH_SIZE
from hpc_det.sgd.operator.errors import BadArgument
from hpc_det.sgd.operator.options import problems_of
from hpc_det.sgd.operator.training_operator import TrainingOperator

_ON_REGISTER = {
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
"""RaySGD's arguments of former days, and where their part is now."""


class FormerArgument(BadArgument, DeprecationWarning):
    """RaySGD raises DeprecationWarning for these."""


def check(known: Mapping[str, Any], others: Mapping[str, Any], names: list[str]) -> None:
    """`known`: the constructor's arguments, `others`: those that it does not have, `names`: all that it has.

    Raises BadArgument with every problem.
    """
    former = [f"{name} is an argument no more; use {_ON_REGISTER[name]}" for name in others if name in _ON_REGISTER]
    unknown = [
        f"{name}: no such argument; {nearest(name, names)}".strip("; ") for name in others if name not in _ON_REGISTER
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
        yield f"num_workers is {num_workers}; it has to be at least 1"
    if not 1 <= min_workers <= max(num_workers, 1):
        yield f"min_workers is {min_workers}; it has to be from 1 to num_workers, which is {num_workers}"
    if num_cpus_per_worker < 1:
        yield f"num_cpus_per_worker is {num_cpus_per_worker}; it has to be at least 1"
    if use_gpu not in (True, False, "auto"):
        yield f"use_gpu is {shown(use_gpu)}; it can be True, False or 'auto'"
    if backend not in ("auto", "gloo", "nccl"):
        yield f"backend is {backend!r}; it can be 'auto', 'gloo' or 'nccl'"
    yield from problems_of(use_fp16, use_tqdm, scheduler_step_freq)
    if BATCH_SIZE in config and not config[BATCH_SIZE] >= num_workers:
        yield f"config[BATCH_SIZE] is {config[BATCH_SIZE]} for {num_workers} workers; each needs at least one sample"
