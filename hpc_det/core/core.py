"""One rank's view of its training: what any loop needs to report, save, resume, stop and take part in a search."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.retention import Policy
from hpc_det.core.meetings import Meetings
from hpc_det.core.operations import Operation
from hpc_det.core.passes import Passes
from hpc_det.core.portable import Portable
from hpc_det.core.progress import Batch, Position, Progress, TrainUnit, period_from_config, unit_from_config, unit_of
from hpc_det.core.reports import Reports
from hpc_det.core.run import Run
from hpc_det.core.saver import CheckpointSaver
from hpc_det.core.search import Search
from hpc_det.core.stop import NO_STOP, Stop, stop_of
from hpc_det.core.tensorboard import TensorBoard
from hpc_det.core.tracked import Resumed, Tracked
from hpc_det.distributed.metrics import plain, spelled
from hpc_det.distributed.preempt import ForcedStop
from hpc_det.distributed.rng import rng_state
from hpc_det.errors import UsageError
from hpc_det.store.attempt import read_stop, request_stop
from hpc_det.store.metrics import number_in

LOOK = 50
"""Batches between two looks at a save in flight."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """The trial of this process."""

    experiment_id: int
    """0 without an experiment."""
    trial_id: int
    trial_seed: int
    """The same on every rank and after every resume."""
    attempt: int
    """Number of the start of this trial, from 1."""
    folder: Path
    """The trial's folder."""


class Core:
    """One rank's view of its training; `hpc_det.core.init` creates it.

    Every rank calls `track`, `batches`, `should_stop`, `checkpoint`, `save`, `search` and `report` of group
    "validation", in the same order. Rank 0's reports count; other groups may be reported on rank 0 alone.
    """

    def __init__(self, run: Run) -> None:
        """`run`: the attempt that this process takes part in. Collective: the newest checkpoint is verified."""
        self._run = run
        self._stop = NO_STOP
        self._tick = run.stop.should_stop
        config = run.spec["config"]
        self.hparams: dict[str, Any] = dict(run.spec["hparams"])
        """The hyperparameters of this trial."""
        self.config: dict[str, Any] = dict(config)
        """The effective configuration of the experiment; outside a job, the argument of `init`."""
        self.distributed = run.distributed
        """This rank, the number of ranks, and communication between them."""
        self.info = Info(
            **{name: run.spec[name] for name in ("experiment_id", "trial_id", "trial_seed")},
            attempt=run.attempt,
            folder=run.folder.path,
        )
        self._meetings = Meetings(run.distributed.messages, lambda: run.stop.ticks)
        searcher = config.get("searcher") or {}
        self._checkpointing = run.checkpointing(
            _kept(config), smaller_is_better=searcher.get("smaller_is_better", True)
        )
        resumed = self._newest()
        self._progress = resumed.progress if resumed else Progress()
        self.latest_checkpoint: Path | None = resumed.folder if resumed else None
        """The folder of the newest checkpoint of this trial, undamaged; None before the first."""
        weights = run.spec.get("warm_start")
        self.warm_start: Path | None = Path(weights) if weights and not resumed else None
        """The folder of a checkpoint of another trial, whose weights this trial starts with; None without one."""
        self._passes = Passes(
            resumed.of_rank if resumed and resumed.has_rank else {},
            done=self._progress.position.done,
            seed=self.info.trial_seed + self.distributed.rank,
        )
        folder = run.folder.tensorboard
        rank = self.distributed.rank
        self._tensorboard = TensorBoard(folder if rank == 0 else folder / f"rank-{rank}")
        self._reports = Reports(run.log, self._tensorboard) if self.distributed.is_chief else None
        self._tracked = Tracked(
            self.distributed,
            Portable(run.spec, run.job.code if run.job else None, trial_type="script"),
            resumed,
            self.warm_start,
            self._of_rank,
        )
        self._begin_search(searcher)
        self._begin_saving(resumed)

    # --- state

    @property
    def step(self) -> int:
        """Number of batches trained, from the beginning of the trial; in the body of a loop over `batches`, the current
        one is included. A loop that does not use `batches` sets it with the step of its reports and checkpoints.
        """
        return self._progress.steps

    @property
    def epoch(self) -> int:
        """Number of passes that `batches` has completed; a loop that does not use `batches` sets it."""
        return self._progress.position.epoch

    @epoch.setter
    def epoch(self, passes: int) -> None:
        self._progress.position = Position(passes)

    def track(self, *, per_rank: bool = False, **objects: Any) -> None:
        """Save the state of `objects` with every checkpoint, and restore it now if this process resumes from one.

        An object has `state_dict` and `load_state_dict`, or is a dict. `per_rank`: it differs between ranks; otherwise
        rank 0 saves it for all. Models that torch's fully_shard has sharded are saved and restored in parts.

        Raises UsageError for an object without a state, a name that is tracked already, and a name that the checkpoint
        lacks; HpcDetError for a state that no checkpoint can hold.
        """
        self._tracked.add(objects, per_rank=per_rank)

    # --- training

    def batches(
        self, loader: Iterable[Any], until: Operation | TrainUnit | int | None = None, *, accumulate: int = 1
    ) -> Iterator[Any]:
        """Yield the batches of one pass over `loader`; after a resume, the rest of the open pass.

        The pass continues at the next batch in the same order, with the random generators of this rank as they were.
        `until`: yield the batches of several passes, up to this length of the whole training. `accumulate`: batches of
        an optimizer step; the iteration ends and checkpoints are saved only after a whole step.

        Between two batches, due checkpoints are saved. After an agreed stop the state is saved and the iteration ends.
        """
        unit = _unit(until)
        if unit is None and self._is_abandoned:
            self._end_pass()
        while not (self._stop or (unit and unit.reached(self._progress))):
            yield from self._pass(loader, unit, accumulate)
            if unit is None:
                return

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the number of each pass that is still to be done, from `epoch` to `count` - 1, until an agreed stop.

        The body iterates over `batches` once. After a resume in the middle of a pass, that pass comes first.
        """
        while (epoch := self.epoch) < count and not self._stop:
            yield epoch
            if self.epoch == epoch and not self._stop:  # the body has left the pass before its end
                self._end_pass()

    def should_stop(self) -> Stop:
        """Return whether the loop must end, and why. It costs less than a microsecond.

        Call it after each step, equally often on every rank: all ranks get the same answer at the same call. The first
        answer that is true comes when the tracked objects are saved.
        """
        if self._tick() or self._stop is not NO_STOP:
            self._stop_here()
            return self._stop
        return NO_STOP

    def restore_generators(self) -> None:
        """Set this rank's random generators as they were at the resumed checkpoint. `batches` does this by itself.

        A loop with its own loader calls this after it has fetched the first batch; it does nothing a second time.
        """
        self._passes.restore_generators()

    # --- reports

    def report(
        self, step: int, metrics: Mapping[str, Any], *, group: str = "training", checkpoint: bool = False
    ) -> None:
        """Report metrics after `step` batches. Rank 0's values count; values that JSON cannot represent become null.

        `group`: "training", "validation", or any other name. Every rank must report validations: the search and the
        retention of checkpoints use the metric that `searcher.metric` names. After a stop, validations are ignored,
        since the resumed run repeats them. `checkpoint`: save the tracked objects first, so that the checkpoint exists
        when the metrics are visible.

        Raises UsageError if a search compares trials and the validation lacks its metric.
        """
        self._reach(step)
        if checkpoint and not self._stop:
            self.save()
            self._saver.settle()
        if group == "validation":
            if not self._stop:
                self._validate(step, metrics)
        elif self._reports and group == "training":
            self._reports.training(step, metrics)
        elif self._reports:
            self._reports.group(group, step, metrics)

    @property
    def search(self) -> Iterator[Operation]:
        """The lengths that the search requests, one after the other.

        The body trains until each and reports a validation there; the search then decides about the next length.
        Without a search there is one, from `searcher.max_length`. Raises UsageError if neither exists, and if the body
        ends before the length or without a validation.
        """
        while not self._stop and (operation := self._operation()):
            before = self._progress.validated, self._search_reports
            yield operation
            if self._stop:
                return
            if not operation.is_reached:
                raise UsageError(
                    f"search: the loop ended at batch {self.step}, epoch {self.epoch}, before the length of "
                    f"{operation.length} {operation.unit}; train until `is_reached`, or use batches(loader, "
                    f"until=operation)"
                )
            if before == (self._progress.validated, self._search_reports):
                raise UsageError(
                    f"search: nothing was reported at {operation.length} {operation.unit}; report the metric "
                    f"{self._metric!r} with group='validation' at the end of each operation"
                )
            if not self._compares:
                return

    # --- checkpoints

    def save(self) -> None:
        """Save the tracked objects. Training continues while the checkpoint is written."""
        self._meet(f"save at batch {self.step}")
        if not self._tracked:
            raise UsageError("save: no object is tracked; call track before, or write the files in core.checkpoint")
        self._settle_position()
        self._saver.save()

    @contextmanager
    def checkpoint(self, step: int | None = None, *, metadata: Mapping[str, Any] | None = None) -> Iterator[Path]:
        """Yield a folder into which every rank writes its files; on leaving the block, the checkpoint is committed.

        The folder is the same on all ranks, so they write files with different names. The tracked objects and the
        random generators are added. After an exception on any rank nothing is committed. `step`: number of batches
        trained, `core.step` by default. `metadata`: entries of metadata.json; JSON values.

        Raises UsageError if ranks pass different steps, and HpcDetError if another rank failed.
        """
        self._reach(self.step if step is None else step)
        self._settle_position()
        call = f"checkpoint at batch {self.step}"
        self._meet(call)
        self._tracked.metadata = metadata or {}
        with self._saver.saving() as folder:
            try:
                yield folder
            except BaseException:
                self._meetings.meet(call, failed=True)
                raise
            self._meet(call)
        self._tracked.metadata = {}
        self._note_saved()

    @property
    def tensorboard_path(self) -> Path:
        """The folder of this rank's TensorBoard event files."""
        return self._tensorboard.folder

    # --- called by init

    def finishing(self) -> AbstractContextManager[None]:
        """Wait for a save in flight if the block raises, as long as the job's deadline allows."""
        return self._saver.finishing(self._run.stop)

    def finish(self) -> None:
        """Save what is unsaved, and write the outcome. Collective."""
        self._meet("leaving the block of init")
        self._settle_position()
        if self._reports:
            self._reports.flush()
        if self._tracked:
            self._saver.save_the_rest(self._run.stop)
        self._saver.settle()
        end = self._end()
        if end == "finished":
            self._saver.prune_all()
        self._tensorboard.close()
        self._passes.close()
        self._run.write_outcome(end, self.step, saved=self._saver.is_saved)

    # --- helpers: beginning

    def _newest(self) -> Resumed | None:
        rank = self.distributed.rank
        found = self._checkpointing.checkpoints.newest(lambda name: not name.startswith("code/"))
        return Resumed(found[0], rank) if found else None

    def _begin_search(self, searcher: Mapping[str, Any]) -> None:
        job = self._run.job
        context = job.searcher if job else None
        length = searcher.get("max_length")
        self._compares = bool(context and context.compares())
        self._metric: str | None = searcher.get("metric")
        self._length = length
        self._search = Search(
            context,
            sets_length=bool(length) and self._compares,
            metric=self._metric,
            smaller_is_better=searcher.get("smaller_is_better", True),
        )
        self._search_reports = 0
        """Validations that were reported to the search."""
        self._has_validated = False
        self._requested: int | None = None
        """The length that the search requests; None: it requests none."""
        if self._compares:
            if not self._search.wants_training():
                self._stop = Stop("search")
            self._requested = self._search.length()

    def _begin_saving(self, resumed: Resumed | None) -> None:
        config = self.config
        self._saver = CheckpointSaver(
            self._tracked,
            self._checkpointing,
            self.distributed,
            progress=self._progress,
            search=self._search,
            log=self._run.log,
        )
        self._is_abandoned = False
        """Whether the loop has left an open pass before its end."""
        self._period = period_from_config(
            config.get("min_checkpoint_period") or 0, self.hparams.get("global_batch_size")
        )
        if resumed:
            self._saver.resumed()
        self._schedule = self._checkpointing.save_schedule
        self._schedule.begin(self.step)
        self._counted, self._counted_at = self.step, time.perf_counter()
        self._next = self._next_boundary()
        position = resumed.of_rank.get("tensorboard", {}) if resumed and resumed.has_rank else {}
        self._tensorboard.cut(position)
        if self.distributed.is_chief:
            self._run.log.begin_at(trained=self.step, validated=self._progress.validated)
            if self._metric:
                self._search.validations = self._run.log.validations(self._metric)

    # --- helpers: batches

    def _pass(self, loader: Iterable[Any], unit: TrainUnit | None, accumulate: int) -> Iterator[Any]:
        progress, passes = self._progress, self._passes
        batches = passes.open(loader, progress.position.epoch)
        self._is_abandoned = True
        with self._run.stop.steps("training", progress.steps):
            for batch in batches:
                passes.done += 1
                progress.steps += 1
                if self._forced and progress.steps in self._forced:
                    self._force_stop()
                yield batch
                if passes.done % accumulate:
                    continue
                if self._tick():
                    self._stop_here()
                    return
                if progress.steps >= self._next:
                    self._do_what_is_due()
                if unit and unit.reached(progress):
                    return
        self._end_pass()

    def _end_pass(self) -> None:
        self._passes.end()
        self._progress.position = Position(self.epoch + 1)
        self._is_abandoned = False
        # `min_checkpoint_period` in epochs
        if self._tracked and self._period and not isinstance(self._period, Batch):
            self._progress.epoch_ended = True
            if self._period.due(self._progress):
                self._saver.save_when_free()

    def _do_what_is_due(self) -> None:
        """Save if a save is due at this batch; finish the save in flight if it is committed."""
        now = time.perf_counter()
        self._schedule.trained(self.step - self._counted, now - self._counted_at)
        if self._tracked:
            self._settle_position()
            self._saver.settle(wait=False)
            self._saver.expect()
            is_due = self._schedule.is_due(self.step) or bool(self._period and self._period.due(self._progress))
            if (is_due or self._saver.is_postponed) and not self._saver.is_saved:
                self._saver.save_when_free()
        self._counted, self._counted_at = self.step, time.perf_counter()
        self._next = self._next_boundary()

    def _next_boundary(self) -> float:
        """Return the number of batches at which something may be due next, the same on all ranks."""
        steps = self.step
        period = self._period.next_boundary(steps) if self._period else float("inf")
        return min(self._schedule.next_look, self._saver.next_expectation, period, steps + LOOK)

    def _settle_position(self) -> None:
        """Put the position in the open pass into the progress, which counts it only when it is saved."""
        self._progress.position = Position(self.epoch, self._passes.done)

    def _of_rank(self) -> dict[str, Any]:
        """Return what this rank's file contains besides tracked objects."""
        return {"rng": rng_state(), "pass": self._passes.state(), "tensorboard": self._tensorboard.position()}

    # --- helpers: stops

    def _meet(self, call: str) -> None:
        self._meetings.meet(call)

    def _stop_here(self) -> None:
        """Save the tracked objects at the first agreed stop, and find out its reason. Collective."""
        if self._stop:
            return
        self._meet(f"stop at batch {self.step}")
        stop, attempt = self._run.stop, self._run.attempt
        request = None
        if self.distributed.is_chief and self._run.job:
            if isinstance(stop, ForcedStop) and stop.is_forced:
                request_stop(self._run.folder.stop, attempt=attempt, reason="resume check", source="verify-resume")
            request = read_stop(self._run.folder.stop, attempt)
        here = stop_of(request, stop.deadline)
        self._stop = Stop(*self.distributed.broadcast_json([here.reason, here.deadline]))
        if self._reports:
            self._reports.flush()
        if self._tracked:
            self._settle_position()
            self._saver.save_the_rest(stop)
            self._note_saved()

    @property
    def _forced(self) -> frozenset[int] | None:
        return self._run.purpose.forced_stops

    def _force_stop(self) -> None:
        assert isinstance(self._run.stop, ForcedStop)
        self._run.stop.force()

    # --- helpers: validations and the search

    def _reach(self, step: int) -> None:
        """Count the steps of a loop that does not use `batches`."""
        self._progress.steps = max(self._progress.steps, step)

    def _validate(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._meet(f"report of group validation at batch {step}")
        own = spelled({name: plain(value) for name, value in metrics.items()}) if self._reports else None
        metrics = self.distributed.broadcast_json(own)
        if self._metric and (self._metric in metrics or self._compares):
            number = number_in(metrics.get(self._metric))
            self._search.take(self._progress, metrics if number is None else {**metrics, self._metric: number})
        self._progress.validated = self.step
        self._has_validated = True
        if self._reports:
            self._reports.validation(step, metrics)
        policy = self.config.get("checkpoint_policy", "best")
        if self._tracked and (policy == "all" or (policy == "best" and self._search.improved)) and self.step:
            self._settle_position()
            self._saver.save()
        if self._compares and not self._stop and (operation := self._operation()) and operation.is_reached:
            self._report_to_search()

    def _report_to_search(self) -> None:
        if self._tracked:
            self._settle_position()
            if not self._saver.is_saved:
                self._saver.save()
            self._saver.settle()  # a report is made once, so its batch must not be lost afterwards
        self._search_reports += 1
        self._requested = self._search.next_length(self._progress)
        if self._requested is None:
            self._stop = Stop("search")

    def _operation(self) -> Operation | None:
        length = self._length
        if self._compares:
            if self._requested is None:
                return None
            unit, amount = unit_of(length or 0), self._requested
        elif length:
            unit, amount = unit_of(length), length if isinstance(length, int) else next(iter(length.values()))
        else:
            raise UsageError("search: searcher.max_length is not set, and no search requests a length; set it")
        until = unit_from_config({unit: amount}, self.hparams.get("global_batch_size"))
        if self._reports and isinstance(until, Batch):
            self._reports.total = until.length
        return Operation(length=amount, unit=unit, until=until, progress=self._progress)

    def _end(self) -> str:
        if self._run.stop.stopped:
            return "stopped"
        if self._compares and not self._stop and self._has_validated:
            self._search.end()  # the loop has ended before the length that the search requested
        return "waiting" if self._search.may_come_back else "finished"

    def _note_saved(self) -> None:
        newest = self._checkpointing.checkpoints.saved
        path = self.distributed.broadcast_json(str(newest.path) if newest else None)
        self.latest_checkpoint = Path(path) if path else self.latest_checkpoint


def _unit(until: Operation | TrainUnit | int | None) -> TrainUnit | None:
    if isinstance(until, Operation):
        return until.until
    return Batch(until) if isinstance(until, int) else until


def _kept(config: Mapping[str, Any]) -> Policy:
    """Return the retention outside a job: of the configuration, or that of an experiment."""
    return Policy.of({**_DEFAULT_KEPT, **(config.get("checkpoint_storage") or {})})


_DEFAULT_KEPT = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
