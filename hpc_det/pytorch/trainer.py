"""The Trainer form: a script of the user's own, under any launcher or none, on the same loop."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from hpc_det.core.distributed import Distributed
from hpc_det.core.rng import seed_everything
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch.attempt import Attempt
from hpc_det.launch.failure import failure_now, note_failure
from hpc_det.launch.rank import RankProcess, join_gang
from hpc_det.launch.signals import SignalPipe
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.local import STOP_SIGNALS_BUT_INTERRUPT, new_folder
from hpc_det.pytorch.run import Run
from hpc_det.pytorch.schedule import CheckpointPolicy, Schedule
from hpc_det.pytorch.trial import PyTorchTrial, interface_problems
from hpc_det.pytorch.units import Batch, TrainUnit, unit_from_config
from hpc_det.search.single import trial_seed


class TrainerContext(PyTorchTrialContext):
    """A context that knows where it runs, for the Trainer."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.spec, run.distributed, run.folder.tensorboard)
        self.run = run


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: Distributed | None = None,
    aggregation_frequency: int = 1,
    enable_tensorboard_logging: bool = True,
) -> Iterator[TrainerContext]:
    """The context of a trial, for the length of a `with` block.

    In a job of hpc_det's, hyperparameters and configuration are the experiment's, and generators are seeded with the
    trial's seed. Elsewhere they are the arguments; ranks are those of torchrun's variables (RANK, WORLD_SIZE, ...), and
    a signal (TERM, USR1, USR2, HUP) makes all ranks save and leave `fit` at the same batch.
    """
    if "HPC_DET_FOLDER" in os.environ:
        process = join_gang(os.environ)
        with _noting_failures(process, process.attempt):
            run = Run.of_attempt(process, os.environ)
            seed_everything(run.spec["trial_seed"])
            yield _context(run, enable_tensorboard_logging)
            run.close()
        return
    with closing(SignalPipe(STOP_SIGNALS_BUT_INTERRUPT)) as signals:
        run = _unmanaged(hparams or {}, exp_conf or {}, distributed, aggregation_frequency, signals)
        yield _context(run, enable_tensorboard_logging)
        run.close()


class Trainer:
    def __init__(self, trial: PyTorchTrial, context: TrainerContext) -> None:
        """`context`: of `init`. Raises UsageError for a trial with missing methods."""
        if problems := interface_problems(type(trial)):
            raise UsageError([f"{type(trial).__name__} {problem}" for problem in problems])
        self._trial = trial
        self._context = context

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
        """Train for `max_length` (in a job by default the experiment's), or until an agreed stop, and save.

        A period of None means at the end only; `reporting_period` is Batch(100). A trial that has checkpoints of its
        own goes on from the newest; otherwise `latest_checkpoint`, a folder, is what its models begin with.
        `test_mode`: one batch of everything.

        Raises UsageError without a length, TypeError for a length that is a schedule.
        """
        if profiling_enabled:
            warnings.warn(
                "fit: profiling_enabled has no effect in this version; see context.set_profiler", stacklevel=2
            )
        run, config = self._context.run, self._context.get_experiment_config()
        searcher = config.get("searcher", {})
        schedule = Schedule(
            max_length=max_length or self._length_of(searcher, test_mode),
            reporting_period=reporting_period or Batch(100),
            validation_period=validation_period,
            checkpoint_period=checkpoint_period,
            checkpoint_policy=self._policy(checkpoint_policy, searcher.get("metric")),
            initial_validation=step_zero_validation,
            metric=searcher.get("metric"),
            smaller_is_better=searcher.get("smaller_is_better", True),
        )
        _ = schedule.max_length.length
        run.train(
            self._trial,
            self._context,
            schedule.for_test() if test_mode else schedule,
            is_trainer=True,
            warm_start=Path(latest_checkpoint) if latest_checkpoint else None,
        )

    def _length_of(self, searcher: dict[str, Any], test_mode: bool) -> TrainUnit:
        if "max_length" in searcher:
            return unit_from_config(searcher["max_length"], self._context.get_hparams().get("global_batch_size"))
        if test_mode:
            return Batch(1)
        raise UsageError(
            "fit: max_length is not given, and there is no experiment that says it; pass Batch(n) or Epoch(n)"
        )

    def _policy(self, policy: CheckpointPolicy, metric: str | None) -> CheckpointPolicy:
        """Without a metric nobody can say what is best (upstream's rule)."""
        if policy == "best" and metric is None:
            warnings.warn("fit: no searcher metric says what is best, so each validation is saved", stacklevel=3)
            return "all"
        return policy


def _context(run: Run, enable_tensorboard_logging: bool) -> TrainerContext:
    context = TrainerContext(run)
    context.set_enable_tensorboard_logging(enable_tensorboard_logging)
    return context


def _unmanaged(
    hparams: dict[str, Any],
    exp_conf: dict[str, Any],
    distributed: Distributed | None,
    aggregation_frequency: int,
    signals: SignalPipe,
) -> Run:
    distributed = distributed or Distributed.from_env(os.environ)
    distributed.start()
    optimizations = {**exp_conf.get("optimizations", {}), "aggregation_frequency": aggregation_frequency}
    spec = {
        "experiment_id": 0,
        "trial_id": 0,
        "trial_seed": distributed.broadcast_json(_seed(exp_conf)),
        "hparams": hparams,
        "config": {**exp_conf, "optimizations": optimizations},
    }
    return Run.unmanaged(spec, new_folder(distributed), distributed, signals, os.environ)


def _seed(exp_conf: dict[str, Any]) -> int:
    """Of the experiment, where it has one; else of torch's generator, which the script may have seeded."""
    seed = exp_conf.get("reproducibility", {}).get("experiment_seed")
    return trial_seed(seed, 1) if seed is not None else torch.initial_seed() % 2**31


@contextmanager
def _noting_failures(process: RankProcess, attempt: Attempt) -> Iterator[None]:
    """What ends the block is the rank's failure, for the job to see, and goes on as usual."""
    try:
        yield
    except BaseException as error:
        rank, message = int(os.environ["RANK"]), f"{type(error).__name__}: {error}"
        if isinstance(error, HpcDetError):
            failure = failure_now(rank, str(error), user_error=True)
        else:
            failure = failure_now(rank, message, traceback=traceback.format_exc())
        note_failure(attempt.trial, attempt.number, failure)
        process.say_goodbye(1)
        raise
    process.say_goodbye(0)
