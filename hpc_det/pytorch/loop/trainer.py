"""The Trainer: training from a script, under any launcher or none, with the same loop."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from hpc_det.checkpoint.retention import Policy
from hpc_det.core.entry import in_job, outside_job, shared_new_folder
from hpc_det.core.progress import Batch, TrainUnit, unit_from_config, unit_of
from hpc_det.core.run import Run
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError, nearest, shown
from hpc_det.pytorch.loop.run import train
from hpc_det.pytorch.loop.schedule import CheckpointPolicy, Schedule
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.pytorch.trial.trial import Trial, interface_problems
from hpc_det.pytorch.trial.trial_context import TrialContext
from hpc_det.store.attempt import Attempt

Context = TypeVar("Context", bound=TrialContext)


class TrainerContext(PyTorchTrialContext):
    """The context of a Trainer, which contains its run."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.spec, run.distributed, run.folder)
        self.run = run


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: Distributed | None = None,
    aggregation_frequency: int | None = None,
    enable_tensorboard_logging: bool = True,
) -> Iterator[TrainerContext]:
    """Yield the context of a trial, for the length of a `with` block.

    In a job of hpc_det, hyperparameters and configuration are the experiment's. Elsewhere they are the arguments; the
    ranks are those of torchrun's variables (RANK, WORLD_SIZE, ...), and a signal (TERM, USR1, USR2, HUP) makes all
    ranks save and leave `fit` at the same batch.

    The random generators of Python, numpy and torch are seeded with the trial's seed on all ranks. Outside a job the
    seed is derived from `reproducibility.experiment_seed` of the configuration, or else from torch's generator on rank
    0.

    `aggregation_frequency` defaults to the value in the configuration's `optimizations`. An existing process group of
    the script is used and kept. After the block, models of several ranks can no longer be trained.

    Raises UsageError if the script's process group has another rank or size than these variables.
    """

    def new_context(run: Run) -> TrainerContext:
        return TrainerContext(_aggregating(run, aggregation_frequency))

    with context_of_script(new_context, hparams, exp_conf, distributed, enable_tensorboard_logging) as context:
        yield context


@contextmanager
def context_of_script(
    new_context: Callable[[Run], Context],
    hparams: dict[str, Any] | None,
    exp_conf: dict[str, Any] | None,
    distributed: Distributed | None,
    enable_tensorboard_logging: bool,
) -> Iterator[Context]:
    """Yield the context of a script: `init` for any kind of trial.

    SystemExit with code 0 in the block is a success, and is raised again after all ranks have left.
    """
    leaving = None
    here = Attempt.is_in(os.environ)
    with in_job() if here else outside_job(hparams or {}, exp_conf or {}, distributed, shared_new_folder) as run:
        context = new_context(run)
        context.set_enable_tensorboard_logging(enable_tensorboard_logging)
        try:
            yield context
        except SystemExit as error:
            if error.code:
                raise
            leaving = error
        context.let_go()
    if leaving:
        raise leaving


class Trainer:
    """Trains a trial from a script."""

    def __init__(self, trial: Trial, context: TrialContext) -> None:
        """`context` is the one that `init` yields. Raises UsageError for another one, and for a trial with missing
        methods.
        """
        if problems := interface_problems(type(trial)):
            raise UsageError([f"{type(trial).__name__} {problem}" for problem in problems])
        run = getattr(context, "run", None)
        if not isinstance(run, Run):
            raise UsageError("Trainer: the context is not from hpc_det.pytorch.init(); create it with that function")
        self._trial = trial
        self._context = context
        self._run = run

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit | None = None,
        checkpoint_policy: CheckpointPolicy = "best",
        latest_checkpoint: str | os.PathLike[str] | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
    ) -> None:
        """Train for `max_length`, or until all ranks agree to stop, and save.

        `max_length` defaults to `searcher.max_length` of the experiment in a job, and comes before it. Under a search
        that compares trials (async_halving, adaptive_asha, custom), a trial ends at this length or where the search
        ends it, whichever is first. A note is printed where the two lengths differ.

        `reporting_period` defaults to the configuration's `scheduling_unit`, or 100 batches. None for another period
        means only at the end; without `checkpoint_period`, a job also saves by its `checkpoint_interval`.

        A trial with checkpoints resumes from the newest. A trial without checkpoints starts from the folder
        `latest_checkpoint`: if this trial saved it (outside a job: a run with the same seed), training resumes;
        otherwise models, optimizers and schedulers take its state, and batches count from 0.

        `test_mode`: train, validate and save one batch. `profiling_enabled`: like `profiling.enabled` of the
        configuration.

        Raises UsageError for a missing length or one below 1, for a period that is not a TrainUnit, for an unknown
        policy, and for `test_mode` inside a job; TypeError for a schedule as a length.
        """
        _check_units(
            checkpoint_period=checkpoint_period,
            validation_period=validation_period,
            max_length=max_length,
            reporting_period=reporting_period,
        )
        if test_mode and Attempt.is_in(os.environ):
            raise UsageError("fit: test_mode is for runs without a job; create the experiment with --test instead")
        run, config = self._run, self._context.get_experiment_config()
        searcher = config.get("searcher", {})
        own, limit = self._own_length(searcher, max_length)
        schedule = Schedule(
            max_length=own or self._length_of(searcher, test_mode or run.purpose.test),
            limit=limit,
            search_unit=None if own or not searcher.get("max_length") else unit_of(searcher["max_length"]),
            global_batch_size=self._context.get_hparams().get("global_batch_size"),
            reporting_period=reporting_period or Batch(config.get("scheduling_unit", 100)),
            validation_period=validation_period,
            checkpoint_period=checkpoint_period,
            checkpoint_policy=_policy(checkpoint_policy, searcher.get("metric")),
            initial_validation=step_zero_validation,
            metric=searcher.get("metric"),
            smaller_is_better=searcher.get("smaller_is_better", True),
            kept=_kept(config),
        )
        for unit in (schedule.max_length, schedule.limit):
            _ = unit and unit.length  # raises for an impossible length, before training starts
        train(
            run,
            self._trial,
            self._context,
            schedule.for_test() if test_mode else schedule,
            is_trainer=True,
            warm_start=Path(latest_checkpoint) if latest_checkpoint else None,
            profiling_enabled=profiling_enabled,
        )

    def _own_length(
        self, searcher: Mapping[str, Any], given: TrainUnit | None
    ) -> tuple[TrainUnit | None, TrainUnit | None]:
        """Return the length that replaces the search's, and the one that limits it: `given` or None. Collective.

        Prints a note if `given` is another length than that of the configuration.
        """
        job = self._run.job
        if given is None or job is None or not searcher.get("max_length"):
            return given, None
        configured = self._length_of(searcher, test=False)
        if given == configured:
            return None, None
        compares = job.searcher.compares()
        if self._context.distributed.is_chief:
            effect = "each trial ends at the smaller length" if compares else f"this trial trains for {given}"
            print(
                f"hpc-det: note: fit: max_length is {given}, and that of searcher {searcher['name']} is {configured} "
                f"(searcher.max_length); {effect}",
                flush=True,
            )
        return (None, given) if compares else (given, None)

    def _length_of(self, searcher: Mapping[str, Any], test: bool) -> TrainUnit:
        if searcher.get("max_length"):
            return unit_from_config(searcher["max_length"], self._context.get_hparams().get("global_batch_size"))
        if test:
            return Batch(1)
        raise UsageError("fit: max_length is missing, and no experiment sets it; pass Batch(n) or Epoch(n)")


def _check_units(**given: object) -> None:
    """Raise UsageError for plain numbers, whose unit (batches or epochs) would be unknown."""
    wrong = {name: unit for name, unit in given.items() if unit is not None and not _is_unit(unit)}
    if wrong:
        raise UsageError(
            [
                f"fit: {name} is {shown(unit)}; give it a unit, such as "
                + (f"Batch({unit}) or Epoch({unit})" if type(unit) is int else "Batch(100) or Epoch(1)")
                for name, unit in wrong.items()
            ]
        )


def _is_unit(given: object) -> bool:
    return isinstance(given, TrainUnit) and type(given) is not TrainUnit


def _policy(policy: CheckpointPolicy, metric: str | None) -> CheckpointPolicy:
    """Return the policy; `best` becomes `all` without a metric (Determined's rule). Raises UsageError for an unknown
    policy.
    """
    if policy not in (known := get_args(CheckpointPolicy)):
        hint = nearest(policy, known) if isinstance(policy, str) else ""
        raise UsageError(f"fit: checkpoint_policy is {shown(policy)}; {hint or 'use one of ' + ', '.join(known)}")
    if policy == "best" and metric is None:
        warnings.warn("fit: no searcher metric decides which is best, so each validation is saved", stacklevel=3)
        return "all"
    return policy


def _kept(config: Mapping[str, Any]) -> Policy:
    """Return the retention at the end; without a configuration, all checkpoints are kept."""
    without = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": sys.maxsize}
    return Policy.of({**without, **config.get("checkpoint_storage", {})})


def _aggregating(run: Run, frequency: int | None) -> Run:
    if frequency is None:
        return run
    config = run.spec["config"]
    optimizations = {**config.get("optimizations", {}), "aggregation_frequency": frequency}
    return replace(run, spec={**run.spec, "config": {**config, "optimizations": optimizations}})
