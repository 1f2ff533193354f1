"""The training loop: local and distributed, fresh and resumed, one path.

    restore
    until trained to the end, or all ranks agree to stop:
        validate and checkpoint where they are due at this batch
        train one batch
    save what is not saved

Everything due at a batch is derived from the progress, so a run that was stopped anywhere, also inside a validation,
does after its resume exactly what it would have done without the stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hpc_det.checkpoint.prune import RESUME_DEPTH
from hpc_det.core.checkpoint import CheckpointContext
from hpc_det.core.distributed import Distributed
from hpc_det.core.metrics import MetricsLog, MetricSums
from hpc_det.core.preempt import StopAgreement
from hpc_det.core.rng import restore_rng, rng_state, seed_everything
from hpc_det.errors import UsageError
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.data import Position
from hpc_det.pytorch.schedule import Length
from hpc_det.pytorch.state import (
    PROGRESS,
    STATE_DICT,
    Progress,
    model_state,
    progress_state,
    rank_file,
    rank_state,
    restore_models,
    restored_progress,
    restored_rank,
)
from hpc_det.pytorch.trial import PyTorchTrial
from hpc_det.search.metric import better


class Loop:
    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        *,
        stop: StopAgreement,
        checkpoints: CheckpointContext,
        log: MetricsLog,
    ) -> None:
        self._trial = trial
        self._context = context
        self._distributed: Distributed = context.distributed
        self._stop = stop
        self._checkpoints = checkpoints
        self._log = log
        self._config = context.get_experiment_config()
        self._callbacks = trial.build_callbacks()
        self._training_data = trial.build_training_data_loader()
        self._validation_data = trial.build_validation_data_loader()
        self._validation_data.check_validation()
        self._share = self._training_data.share(self._distributed.size)
        self._max_length = self._length(self._config["searcher"]["max_length"])
        self._validation_period = self._length(self._config["min_validation_period"])
        self._checkpoint_period = self._length(self._config["min_checkpoint_period"])
        self._progress = Progress()
        self._window = MetricSums()
        self._validations: dict[int, float] = {}
        self._improved = False
        """Whether the last validation was the best so far."""
        self._saved: tuple[int, int] | None = None
        """Batches, and batches at the last validation, in the newest checkpoint."""

    def run(self) -> Progress:
        """Train until the end or the agreed stop, and leave everything saved."""
        self._restore()
        self._set_training_mode(True)
        batches = self._batches()
        while True:
            settled = self._settle_boundary()
            if (settled and self._finished()) or self._stop.should_stop():
                break
            if settled:
                self._train(next(batches))
        if not self._is_saved():
            self._save()
        if self._finished() and not self.stopped and self._distributed.is_chief:
            self._prune(latest=self._config["checkpoint_storage"]["save_trial_latest"])
        return self._progress

    @property
    def stopped(self) -> bool:
        """Whether `run` returned early because all ranks agreed to."""
        return self._stop.stopped

    # --- start

    def _restore(self) -> None:
        found = self._checkpoints.newest()
        if found is None:
            self._seed_this_rank()
        else:
            folder, _ = found
            restore_models(folder, self._context, self._callbacks)
            self._progress = restored_progress(folder)
            self._context.set_stop_requested(self._progress.stop_requested)
            window = restored_rank(folder, self._distributed.rank)
            if window is None:
                self._seed_this_rank()
            else:
                self._window.restore(window)
            self._saved = self._reached()
        if self._distributed.is_chief:
            self._log.begin_at(trained=self._progress.steps, validated=self._progress.validated)
            self._validations = self._log.validations(self._config["searcher"]["metric"])

    def _seed_this_rank(self) -> None:
        """Weights were built from the trial's seed, the same on all ranks; their noise from here on differs."""
        seed_everything((self._context.get_trial_seed() + self._distributed.rank) % 2**32)

    def _batches(self) -> Iterator[Any]:
        return self._training_data.training_batches(
            rank=self._distributed.rank,
            size=self._distributed.size,
            position=self._progress.position,
            seed=self._context.get_trial_seed(),
        )

    # --- one batch

    def _train(self, batch: Any) -> None:
        progress, context = self._progress, self._context
        context.set_progress(progress.steps, progress.position.epoch)
        metrics = self._trial.train_batch(context.to_device(batch), progress.position.epoch, progress.steps)
        self._window.add(metrics if isinstance(metrics, dict) else {"loss": metrics})
        before = progress.position
        progress.steps += 1
        progress.position, _ = self._share.span(before)
        progress.stop_requested = context.get_stop_requested()
        self._step_schedulers(before)
        if self._finished() or progress.steps % self._config["scheduling_unit"] == 0:
            self._report_training()

    def _step_schedulers(self, before: Position) -> None:
        epoch_ended = self._progress.position.epoch > before.epoch
        for scheduled in self._context.scheduled_steps:
            scheduled.after_batch(self._progress.steps)
            if epoch_ended:
                scheduled.after_epoch(self._progress.position.epoch)
        if epoch_ended:
            for callback in self._callbacks.values():
                callback.on_training_epoch_end(before.epoch)

    def _report_training(self) -> None:
        metrics = self._window.mean_over_ranks(self._distributed)
        self._window = MetricSums()
        self._report("training", metrics)

    # --- boundaries

    def _settle_boundary(self) -> bool:
        """Validate and save if that is due here; False when a stop is on its way and the validation was abandoned."""
        if self._validation_is_due() and not self._validate():
            return False
        if self._checkpoint_is_due():
            self._save()
        return True

    def _finished(self) -> bool:
        progress = self._progress
        return self._max_length.reached(progress.steps, progress.position) or self._context.get_stop_requested()

    def _validation_is_due(self) -> bool:
        progress = self._progress
        if progress.validated == progress.steps:
            return False
        if progress.steps == 0:
            return bool(self._config["perform_initial_validation"])
        return self._finished() or self._validation_period.due(progress.steps, progress.position)

    def _checkpoint_is_due(self) -> bool:
        progress, policy = self._progress, self._config["checkpoint_policy"]
        if self._is_saved() or progress.steps == 0:
            return False
        if self._checkpoint_period.due(progress.steps, progress.position):
            return True
        return progress.validated == progress.steps and (policy == "all" or (policy == "best" and self._improved))

    # --- validation

    def _validate(self) -> bool:
        """False when it was abandoned for a stop: it is done again after the resume.

        Training's generators are put back afterwards, so that validating more or less often changes no weight.
        """
        generators = rng_state()
        sums = self._evaluate()
        restore_rng(generators)
        if sums is None:
            return False
        metrics = sums.mean_over_ranks(self._distributed)
        self._take_validation(metrics)
        for callback in self._callbacks.values():
            callback.on_validation_end(metrics)
        return True

    def _evaluate(self) -> MetricSums | None:
        loader = self._validation_data
        batches = loader.validation_batches(
            rank=self._distributed.rank, size=self._distributed.size, seed=self._context.get_trial_seed()
        )
        sums = MetricSums()
        self._set_training_mode(False)
        whole = self._evaluate_batches(batches, sums)
        self._set_training_mode(True)
        return sums if all(self._distributed.gather_json(whole)) else None

    def _evaluate_batches(self, batches: Iterable[Any], sums: MetricSums) -> bool:
        """False when it left off, since this rank knows of a stop."""
        with torch.no_grad():
            for batch in batches:
                if self._stop.noticed:
                    return False
                sums.add(self._trial.evaluate_batch(self._context.to_device(batch)))
        return True

    def _take_validation(self, metrics: dict[str, float]) -> None:
        searcher, progress = self._config["searcher"], self._progress
        if searcher["metric"] not in metrics:
            raise UsageError(
                f"searcher.metric: '{searcher['metric']}' is not among the validation metrics {sorted(metrics)} that "
                f"evaluate_batch returns; name one of those"
            )
        value = metrics[searcher["metric"]]
        self._improved = better(value, progress.best, searcher["smaller_is_better"])
        if self._improved:
            progress.best = value
        progress.validated = progress.steps
        self._validations[progress.steps] = value
        self._report("validation", metrics)

    def _set_training_mode(self, training: bool) -> None:
        for model in self._context.wrapped_models:
            model.train(training)

    # --- saving

    def _is_saved(self) -> bool:
        return self._saved == self._reached() or self._progress.steps == 0

    def _reached(self) -> tuple[int, int]:
        """A validation changes what is saved: callbacks, and schedulers that they step."""
        return self._progress.steps, self._progress.validated

    def _save(self) -> None:
        files = {rank_file(self._distributed.rank): rank_state(self._window.state())}
        if self._distributed.is_chief:
            files[STATE_DICT] = model_state(self._context, self._callbacks)
            files[PROGRESS] = progress_state(self._progress)
        self._checkpoints.save(self._progress.steps, files, self._finish_checkpoint)
        self._saved = self._reached()
        if self._distributed.is_chief:
            self._prune(latest=max(RESUME_DEPTH, self._config["checkpoint_storage"]["save_trial_latest"]))

    def _finish_checkpoint(self, folder: Any) -> None:
        for callback in self._callbacks.values():
            callback.on_checkpoint_write_end(folder)

    def _prune(self, latest: int) -> None:
        self._checkpoints.prune(
            self._validations,
            smaller_is_better=self._config["searcher"]["smaller_is_better"],
            best=max(self._config["checkpoint_storage"][key] for key in ("save_trial_best", "save_experiment_best")),
            latest=latest,
        )

    # --- helpers

    def _report(self, kind: str, metrics: dict[str, float]) -> None:
        if self._distributed.is_chief:
            total = self._max_length.batches(self._share.batches_per_epoch())
            self._log.report(kind, self._progress.steps, total, metrics)

    def _length(self, config: Any) -> Length:
        return Length.from_config(config, self._share.global_batch)
