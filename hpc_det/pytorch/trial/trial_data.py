"""The training and validation batches of a trial on one rank, checked and moved to its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpc_det.config.rank_variables import NO_WHOLE_BATCH
from hpc_det.core.progress import Position
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import DataLoader, Evaluation, training_data, validation_data
from hpc_det.pytorch.strategies.device import mapped
from hpc_det.pytorch.trial.trial import BuiltTrial
from hpc_det.pytorch.trial.trial_context import TrialContext


class TrialData:
    """The training and validation data of one rank."""

    def __init__(self, built: BuiltTrial) -> None:
        """Build the trial's loaders and check them. Collective.

        Raises UsageError for a loader that is not hpc_det's without the user's permission, that has too few records for
        a batch, or that differs between ranks.
        """
        trial, strategy, self._context = built.trial, built.strategy, built.context
        context, mpu, evaluation = self._context, strategy.mpu, strategy.evaluation
        loads = mpu.should_build_data_loader
        training = _checked(trial.build_training_data_loader(), "training", context) if loads else None
        validation = _checked(trial.build_validation_data_loader(), "validation", context) if loads else None
        _check_size(training, strategy.micro_batch_size)
        self._loads_training, self._loads_validation = training is not None, validation is not None
        place: dict[str, Any] = {
            "rank": mpu.data_parallel_rank,
            "size": mpu.data_parallel_world_size,
            "seed": context.get_trial_seed(),
            "gang": context.distributed,
            "per_batch": strategy.micro_batches,
        }
        self.training = training_data(training, **place, same_size=evaluation is Evaluation.PIPELINED)
        self.validation = validation_data(validation, **place, evaluation=evaluation)
        # A measurement of the throughput trains whole batches only, and would otherwise measure nothing.
        if context.trains_on and not self.training.whole_batches(Position()):
            raise UsageError(f"build_training_data_loader: {NO_WHOLE_BATCH}; use a smaller one, or more data")

    def training_batches(self, position: Position) -> Iterator[Any] | None:
        """Return the batches from `position` on as the trial receives them; None if other ranks load for this one."""
        if not self._loads_training:
            return None
        loaded = self.training.batches(position)
        batches = self._context.on_device(loaded, loaded_in_workers=self.training.loads_in_workers)
        return _over_and_over(next(batches)) if self._context.trains_on == "first batch" else batches

    def validation_batches(self) -> Iterator[Any] | None:
        """Return this rank's share of one validation as the trial receives it, or None if it loads none."""
        if not self._loads_validation:
            return None
        batches = self.validation.batches()
        return self._context.on_device(batches, loaded_in_workers=self.validation.loads_in_workers)


def _over_and_over(batch: Any) -> Iterator[Any]:
    """Yield a batch without end: the same tensors each time, in new dicts and lists, which a trial may change."""
    while True:
        yield mapped(lambda value: value, batch)


def _check_size(training: Any, size: int | None) -> None:
    """Raise UsageError if an hpc_det DataLoader has another batch size than the DeepSpeed config, which is `size`.

    A loader with a `batch_sampler` is not checked, since its batches may be of any size.
    """
    if size is None or not isinstance(training, DataLoader) or training.batch_sampler is not None:
        return
    if training.batch_size != size:
        raise UsageError(
            f"build_training_data_loader: batch_size is {training.batch_size}, but train_micro_batch_size_per_gpu of "
            f"the deepspeed config is {size}; use batch_size=context.get_train_micro_batch_size_per_gpu()"
        )


def _checked(loader: Any, kind: str, context: TrialContext) -> Any:
    """Return `loader`. Raises UsageError if it is not hpc_det's and the user has not allowed others."""
    # None is valid if another rank loads for this one; hpc_det.pytorch.data.batch_shapes checks that.
    if loader is not None and not isinstance(loader, DataLoader) and context.checks_dataset_reproducibility:
        raise UsageError(
            f"build_{kind}_data_loader returned {type(loader).__name__}; use hpc_det.pytorch.DataLoader, which makes "
            f"the order of records reproducible and shards them over the ranks, or call "
            f"{context.own_loaders_allowed_by}() and do both in your loader"
        )
    return loader
