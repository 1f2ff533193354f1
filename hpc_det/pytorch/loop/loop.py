"""The training loop, the same for local and distributed, fresh and resumed runs.

  build the data, restore
  until trained to the end, or all ranks agree to stop:
      validate and checkpoint if due at this batch; before the last validation, start a checkpoint
      train up to the next batch at which anything can be due, and report
      if the search needs the metric: save, report, and continue if it wants more of this trial
  save what no checkpoint contains

Everything due at a batch is derived from the progress. So a run that was stopped anywhere, even inside a validation,
does the same after its resume as without the stop.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.core.portable import Portable
from hpc_det.core.progress import Progress, restored_progress
from hpc_det.core.saver import Checkpointing, CheckpointSaver
from hpc_det.core.search import Search
from hpc_det.core.timer import untimed
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricsLog
from hpc_det.distributed.preempt import StopAgreement
from hpc_det.distributed.rng import restore_rng, seed_everything
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.pytorch.loop.schedule import Schedule
from hpc_det.pytorch.loop.training_report import TrainingReport
from hpc_det.pytorch.loop.trial_content import TrialContent
from hpc_det.pytorch.loop.validation import Validation
from hpc_det.pytorch.profiling.measurements import Measurements
from hpc_det.pytorch.strategies.strategy import reporting_ranks
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.trial import BuiltTrial
from hpc_det.pytorch.trial.trial_data import TrialData


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The start of a trial that has no checkpoint, at batch 0."""

    checkpoint: Path | None = None
    """Checkpoint for models, optimizers and schedulers. If this trial saved it, the trial resumes from it instead."""
    weights: Path | None = None
    """Checkpoint for the weights of the models alone. Not with `checkpoint`.

    Optimizers and schedulers keep their initial state, since the hyperparameters of this trial may differ.
    """


class Loop:
    """The training loop of one rank."""

    def __init__(
        self,
        built: BuiltTrial,
        schedule: Schedule,
        *,
        stop: StopAgreement,
        log: MetricsLog,
        checkpointing: Checkpointing,
        portable: Portable,
        searcher: SearcherContext | None = None,
        warm_start: WarmStart | None = None,
        measurements: Measurements | None = None,
    ) -> None:
        """`portable` adds the files with which a checkpoint can be loaded outside the experiment.

        `searcher`: the search that decides how long the trial trains, if any.

        `measurements`: the profiling measurements; None without profiling.
        """
        self._built = built
        self._trial, self._context, self._strategy = built.trial, built.context, built.strategy
        self._schedule = schedule
        self._longest = schedule.max_length
        self._distributed: Distributed = built.context.distributed
        self._stop = stop
        self._log = log
        self._checkpointing = checkpointing
        self._checkpoints, self._save_schedule = checkpointing.checkpoints, checkpointing.save_schedule
        self._portable = portable
        self._search = Search(
            searcher,
            sets_length=schedule.search_unit is not None,
            metric=schedule.metric,
            smaller_is_better=schedule.smaller_is_better,
        )
        self._warm_start = warm_start or WarmStart()
        self._measurements = measurements
        self._progress = Progress()

    def run(self) -> Progress:
        """Train until the end or the agreed stop, with everything saved on return."""
        timed = self._measurements.timed if self._measurements else untimed
        self._callbacks = Callbacks(self._trial.build_callbacks(), timed)
        with ExitStack() as stack:
            stack.callback(self._callbacks.call, "on_trial_shutdown")  # registered first, so called last
            batches = self._begin(stack)
            with self._saver.finishing(self._stop):
                self._train_to_the_end(batches)
                self._saver.save_the_rest(self._stop)
        if self.end == "finished":
            self._saver.prune_all()
        return self._progress

    @property
    def is_saved(self) -> bool:
        """True if the newest checkpoint contains everything trained."""
        return self._saver.is_saved

    @property
    def end(self) -> str:
        """The end of `run`: "stopped" by agreement of all ranks, "waiting" for the search, or "finished"."""
        if self._stop.stopped:
            return "stopped"
        return "waiting" if self._search.may_come_back else "finished"

    def _train_to_the_end(self, batches: Any) -> None:
        if not self._search.wants_training():
            return
        while not self._stop.stopped:
            settled = self._settle_boundary()
            if settled and self._schedule.finished(self._progress) and not self._goes_on():
                return
            if not self._stop.should_stop() and settled:
                self._train_to_boundary(batches)
                self._saver.expect()

    def _goes_on(self) -> bool:
        """Return whether the search wants more of this trial, which has trained to the requested length or limit."""
        if not self._search.takes_reports:
            return False
        if not self.is_saved:
            self._saver.save()
        self._saver.settle()  # a report is made once, so its batch must not be lost afterwards
        is_limited = self._schedule.limit_reached(self._progress)
        has_length = self._schedule.max_length.reached(self._progress)
        if self._progress.stop_requested or has_length or self._schedule.max_length == self._longest:
            is_own = not has_length or self._schedule.search_unit is None
            until = self._search.next_length(self._progress, is_own=is_own)
            if until is None:
                return False
            self._schedule = self._schedule.until(until)
        if is_limited:
            self._search.end(self._progress)
        return not is_limited

    # --- start

    def _begin(self, stack: ExitStack) -> Any:
        """Build the data, then restore the state, in Determined's order: creating an iterator may draw
        random numbers.
        """
        folder = self._checkpoint_to_resume()
        ranks = self._read_progress(folder) if folder else 0
        self._context.begin_training(self._progress.steps)
        self._callbacks.call("on_trial_startup", self._progress.steps, folder.name if folder else None)
        batches = self._build_data(stack)
        generators = self._resume(folder, ranks) if folder else None
        if not folder:
            self._begin_anew()
        self._continue_log()
        self._strategy.check_savable(self._callbacks)  # fails before training, not at the first checkpoint
        self._save_schedule.begin(self._progress.steps)
        self._callbacks.call("on_training_start")
        self._context.profiler.start()
        stack.callback(self._context.profiler.stop)
        self._batch_ends = [*self._strategy.batch_ends]
        if self._context.profiler.running:
            self._batch_ends.append(lambda number: self._context.profiler.step())
        stack.callback(self._context.tensorboard.close)
        # Last, since everything before may draw random numbers, and an uninterrupted run draws those only once.
        if generators:
            restore_rng(generators)
        else:
            self._seed_this_rank()
        return batches

    def _checkpoint_to_resume(self) -> Path | None:
        """Return the newest checkpoint of this trial, or the one of the warm start, or None.

        A run outside a job has a new folder, and may be given a checkpoint of an older one.
        """
        if found := self._checkpoints.newest(self._strategy.reads):
            self._mend_code(found[0])
            return found[0]
        given = self._warm_start.checkpoint
        if given is None:
            return None
        self._checkpoints.verify(given, self._strategy.reads)
        is_own: bool = self._distributed.broadcast_json(self._portable.is_of_this_trial(given))
        if self._distributed.is_chief:
            how = "resuming from" if is_own else "starting at batch 0 with the state of another trial or seed, from"
            print(f"hpc-det: {how} {given}", flush=True)
        return given if is_own else None

    def _mend_code(self, folder: Path) -> None:
        if self._distributed.is_chief:
            for problem in self._portable.mend(folder):
                print(f"hpc-det: warning: {problem}", flush=True)

    def _read_progress(self, folder: Path) -> int:
        """Restore the progress, and return the number of ranks of the former gang."""
        self._progress, ranks = restored_progress(folder)
        # A validation may be due before the next batch, and the trial may ask for the number of the last one.
        if self._progress.steps:
            self._context.batch = last = self._progress.steps - 1
            self._context.begin_epoch(
                self._progress.last_epoch,
                first=last if self._progress.epoch_started else None,
                last=last if self._progress.epoch_ended else None,
            )
        return ranks

    def _build_data(self, stack: ExitStack) -> Any:
        strategy, data = self._strategy, TrialData(self._built)
        for each in (data.training, data.validation):
            stack.callback(each.close)
        self._data = data.training
        self._total = self._schedule.batches(self._data.batches_per_epoch)
        if (until := self._search.length()) is not None:
            self._schedule = self._schedule.until(until)
        reporting = reporting_ranks(self._distributed.gather_json(strategy.mpu.should_report_metrics))
        self._validation = Validation(
            self._built,
            self._callbacks,
            data,
            self._stop,
            reporting=reporting,
            limit=self._schedule.validation_batches,
        )
        self._open_report = TrainingReport(self._context, strategy, reporting, self._callbacks)
        self._saver = CheckpointSaver(
            TrialContent(strategy, self._portable, self._callbacks, self._open_report.window),
            self._checkpointing,
            self._distributed,
            progress=self._progress,
            search=self._search,
            log=self._log,
            never=self._schedule.only_trains,
        )
        if self._measurements:
            self._measure(self._measurements, data, stack)
        return strategy.begin(self._data, data.training_batches(self._progress.position), self._progress)

    def _measure(self, measurements: Measurements, data: TrialData, stack: ExitStack) -> None:
        measurements.measure(self._built, data, self._open_report, self._validation)
        # The calls of train_batch up to a boundary are timed as one, including the loop's own microseconds: timing each
        # call would cost as much.
        measurements.time(self, "_train", "train_batch")
        measurements.time(self, "_report_training", "reduce_metrics")
        measurements.time(self._saver, "save", "checkpoint")
        measurements.time(self._saver, "settle", "checkpoint")
        stack.callback(measurements.end, self._progress)

    def _resume(self, folder: Path, ranks: int) -> dict[str, Any] | None:
        """Restore the state, and return that of the random generators if the former gang had this rank."""
        self._strategy.restore(folder, self._callbacks)
        self._saver.resumed()
        return self._strategy.restore_rank(folder, ranks, self._open_report.window)

    def _begin_anew(self) -> None:
        self._context.tensorboard.cut({})
        if self._warm_start.checkpoint:
            self._strategy.restore(self._warm_start.checkpoint, self._callbacks)
        elif self._warm_start.weights:
            self._load_weights(self._warm_start.weights)

    def _load_weights(self, folder: Path) -> None:
        if self._distributed.is_chief:
            print(f"hpc-det: starting with the weights in {folder}", flush=True)
        self._checkpoints.verify(folder, self._strategy.reads)
        self._strategy.restore_weights(folder)

    def _continue_log(self) -> None:
        if self._distributed.is_chief:
            self._log.begin_at(trained=self._progress.steps, validated=self._progress.validated)
            if self._schedule.metric:
                self._search.validations = self._log.validations(self._schedule.metric)

    def _seed_this_rank(self) -> None:
        """Seed this rank's random generators.

        Weights were built from the trial's seed, the same on all ranks. From here on ranks differ, except those that
        share one copy of the model.
        """
        seed_everything((self._context.get_trial_seed() + self._strategy.mpu.data_parallel_rank) % 2**32)

    # --- batches

    def _train_to_boundary(self, batches: Any) -> None:
        """Train batches of one epoch, until something can be due or all ranks agree to stop.

        Work that is the same for all these batches is done once, since it would cost microseconds at each batch.
        """
        progress, first, start = self._progress, self._progress.steps, self._progress.position
        until = min(self._schedule.next_boundary(first), self._save_schedule.next_look, self._saver.next_expectation)
        if self._measurements:
            until = min(until, self._measurements.at(progress))
        count = int(min(until - first, max(self._data.whole_batches(start), 1)))
        ends_epoch = self._data.after(start, count).epoch > start.epoch
        self._context.batch = first
        self._context.begin_epoch(
            start.epoch,
            first=first if progress.starts_epoch else None,
            last=first + count - 1 if ends_epoch else None,
        )
        if progress.starts_epoch:
            self._callbacks.call("on_training_epoch_start", start.epoch)
        began = time.perf_counter()
        with self._stop.steps("training", first):
            trained = self._train(batches, first, count, start.epoch)
        self._save_schedule.trained(trained, time.perf_counter() - began)
        progress.advance(self._data.after(start, trained), trained)
        if progress.epoch_ended:
            self._callbacks.call("on_training_epoch_end", start.epoch)
        if self._schedule.report_is_due(progress):
            self._report_training()

    def _train(self, batches: Any, first: int, count: int, epoch: int) -> int:
        """Train up to `count` batches from number `first` on, and return how many were trained before an agreed stop.

        At least one is trained, since the caller has checked for a stop.
        """
        context, add, should_stop = self._context, self._open_report.add, self._stop.should_stop
        train_batch, batch_ends = self._strategy.train_batch, self._batch_ends
        for number in range(first, first + count):
            if number > first and should_stop():
                return number - first
            context.batch = number
            # The metrics get no name here: it would keep their memory, which the next batch needs.
            add(train_batch(batches, epoch, number))
            for end in batch_ends:
                end(number)
        return count

    def _report_training(self) -> None:
        metrics, facts, self._progress.stop_requested = self._open_report.close()
        self._report("training", metrics, **facts)

    # --- boundaries

    def _settle_boundary(self) -> bool:
        """Validate and save if due. Return False if a stop interrupted the validation."""
        self._saver.settle(wait=False)
        if self._schedule.validation_is_due(self._progress):
            if self._schedule.finished(self._progress) and not self.is_saved:
                self._saver.save(is_provisional=True)  # so that a failing last validation does not lose the training
            if not self._validate():
                return False
        self._save_what_is_due()
        return True

    def _save_what_is_due(self) -> None:
        progress = self._progress
        is_due = self._save_schedule.is_due(progress.steps) or self._schedule.checkpoint_is_due(progress)
        if self.is_saved:
            return
        if self._schedule.validated_is_kept(progress, improved=self._search.improved):
            self._saver.save()
        elif is_due or self._saver.is_postponed:
            self._saver.save_when_free()

    def _validate(self) -> bool:
        began = time.perf_counter()
        metrics = self._validation.run()
        if metrics is None:
            return False
        self._take_validation(metrics, seconds=time.perf_counter() - began)
        # The trial or a callback may have asked for the end during the validation.
        self._progress.stop_requested |= any(self._distributed.gather_json(self._context.get_stop_requested()))
        return True

    def _take_validation(self, metrics: dict[str, Any], seconds: float) -> None:
        self._search.take(self._progress, metrics)
        self._progress.validated = self._progress.steps
        self._report("validation", metrics, seconds=seconds)

    # --- helpers

    def _report(self, kind: str, metrics: dict[str, Any], **facts: float) -> None:
        if self._distributed.is_chief:
            self._log.report(kind, self._progress.steps, self._total, metrics, **facts)
            self._context.tensorboard.report(kind, self._progress.steps, metrics)
