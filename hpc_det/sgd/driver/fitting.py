"""fit: a function of the user's on every rank of an elastic gang, as with today's Ray Train (Ray 2.60).

Where a rank dies, or the gang gets another size, the function begins anew on all ranks, with the last checkpoint that
was committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from hpc_det.errors import UsageError, shown
from hpc_det.sgd.capacity import Capacity, capacity_of
from hpc_det.sgd.driver.gang import Gang
from hpc_det.sgd.driver.nodes import Patience
from hpc_det.sgd.driver.opening import on_devices, opened, wanted_of
from hpc_det.sgd.driver.reports import Keep, Reports, Result
from hpc_det.sgd.driver.run_folder import run_of
from hpc_det.sgd.place import Settings
from hpc_det.sgd.rank.train_loop import Loop, LoopOperator


def fit(
    train_loop_per_worker: Callable[..., Any],
    *,
    train_loop_config: Mapping[str, Any] | None = None,
    num_workers: int | tuple[int, int] = 1,
    num_cpus_per_worker: int = 1,
    use_gpu: bool | Literal["auto"] = "auto",
    executor: str | Capacity | None = None,
    initialization_hook: Callable[[], None] | None = None,
    run: str | os.PathLike[str] | None = None,
    max_failures: int = 3,
    num_to_keep: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] = "min",
    timeout_s: float = 1800.0,
    heartbeat_timeout_s: float = 10.0,
    startup_timeout_s: float | None = None,
    hang_timeout_s: int | None = None,
) -> Result:
    """Run `train_loop_per_worker(train_loop_config)` on every rank until it returns on all of them.

    `num_workers`: how many ranks, or (fewest, most) of an elastic gang. Placement as TorchTrainer's, and `run`, too: a
    call with the run of one that was ended goes on from its last checkpoint. `max_failures`: how often ranks may die;
    preemptions do not count. `num_to_keep`: of the checkpoints, the best by `metric` and `mode`; None: all.
    `hang_timeout_s`: after so long without a report the gang hangs (None: 20 times the longest so far, at least four
    hours; without end before the first one of any rank).

    What the function raises on a rank is raised here at once, with that rank's traceback as its cause. Raises
    RetriesUsedUp (a RuntimeError), NotEnoughRanks (a TimeoutError), and UsageError for what cannot be done.
    """
    least, most = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    _check(train_loop_per_worker, least, most, max_failures, num_to_keep, mode)
    capacity = capacity_of(executor, num_workers=most, cpus_per_worker=num_cpus_per_worker, use_gpu=use_gpu)
    its_run = run_of(run, os.environ)
    path = its_run.folder.path
    reports = Reports(path, Keep(most=num_to_keep, metric=metric, mode=mode))
    if reports.is_finished:
        return reports.result()
    settings = Settings(
        operator_cls=LoopOperator,
        config={},
        num_workers=most,
        **on_devices(capacity, use_gpu=use_gpu, timeout_s=timeout_s),
    )
    wanted = wanted_of(
        capacity, num_workers=most, min_workers=least, settings=lambda size: settings, hook=initialization_hook
    )
    patience = Patience(
        heartbeat_timeout_s=heartbeat_timeout_s,
        startup_timeout_s=startup_timeout_s,
        hang_timeout_s=hang_timeout_s,
    )

    def begun(gang: Gang) -> Loop:
        return Loop(train_loop_per_worker, train_loop_config, reports.begin(gang, wanted, path.name))

    elastic = opened(its_run, capacity, patience, wanted, is_durable=False)
    has_returned = False
    try:
        elastic.loop(begun, max_failures)
        has_returned = True
    finally:
        elastic.stop(force=not has_returned)
    reports.finish()
    return reports.result()


def _check(function: Any, least: Any, most: Any, max_failures: int, num_to_keep: int | None, mode: str) -> None:
    problems = []
    if not callable(function):
        problems.append(f"train_loop_per_worker: got {shown(function)}; give the function that every rank runs")
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        problems.append(f"num_workers: got {shown((least, most))}; give a number >= 1, or (fewest, most)")
    if max_failures < 0:
        problems.append(f"max_failures: got {max_failures}; expected >= 0")
    if num_to_keep is not None and num_to_keep < 1:
        problems.append(f"num_to_keep: got {num_to_keep}; expected >= 1, or None for all")
    if mode not in ("min", "max"):
        problems.append(f"mode: got {shown(mode)}; expected 'min' or 'max'")
    if problems:
        raise UsageError(problems)
