"""The parts of one rank's loop, and what happens between its batches, at the end of its bodies, and at a stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import CODE
from hpc_det.checkpoint.retention import Policy
from hpc_det.core.bodies import Bodies, Tail
from hpc_det.core.external_loader import length_of
from hpc_det.core.meetings import Meetings
from hpc_det.core.passes import Passes
from hpc_det.core.portable import Portable
from hpc_det.core.profile import Profile
from hpc_det.core.progress import Batch, Epoch, Position, Progress, TrainUnit, period_from_config
from hpc_det.core.reports import Reports
from hpc_det.core.run import Run
from hpc_det.core.saver import CheckpointSaver
from hpc_det.core.saves import Saves
from hpc_det.core.search import Searching
from hpc_det.core.short_run import ShortRun
from hpc_det.core.stop import NO_STOP, REPORT_WAITS, Stop, stop_of
from hpc_det.core.tensorboard import TensorBoard
from hpc_det.core.tracked import Resumed, Tracked
from hpc_det.distributed.metrics import plain, spelled
from hpc_det.distributed.rng import mixed_seed, rng_state
from hpc_det.errors import UsageError, count
from hpc_det.store.attempt import StopRequest, read_stop


@dataclass(frozen=True, kw_only=True)
class Info:
    """The trial of this process."""

    experiment_id: int
    trial_id: int
    """Number of the trial in its experiment, from 1; 0 without an experiment."""
    trial_seed: int
    """The same on every rank and after every resume."""
    attempt: int
    """Number of the start of this trial, from 1."""
    folder: Path
    """The trial's folder."""
    test: bool
    """True in a run with `--test`, which trains one batch."""


class Loop:
    """One rank's loop, whose public face is hpc_det.core.core.Core.

    Every method is called by all ranks at the same batch, unless it says otherwise.
    """

    def __init__(self, run: Run) -> None:
        """`run`: the attempt that this process takes part in. Collective: the newest checkpoint is verified."""
        self._run = run
        self._agreement = run.stop
        self._tick = run.stop.should_stop
        self._stop = NO_STOP
        self._meetings = Meetings(run.distributed.messages, lambda: run.stop.ticks)
        self.distributed = run.distributed
        """This rank, the number of ranks, and communication between them."""
        self.hparams: dict[str, Any] = dict(run.spec["hparams"])
        """The hyperparameters of this trial."""
        self.config: dict[str, Any] = dict(run.spec["config"])
        """The effective configuration of the experiment; outside a job, the argument of `init`."""
        self.info = Info(
            **{name: run.spec[name] for name in ("experiment_id", "trial_id", "trial_seed")},
            attempt=run.attempt,
            folder=run.folder.path,
            test=run.purpose.test,
        )
        searcher = self.config.get("searcher") or {}
        checkpointing = run.checkpointing(_kept(self.config), smaller_is_better=searcher.get("smaller_is_better", True))
        self._checkpoints = checkpointing.checkpoints
        rank = self.distributed.rank
        found = self._checkpoints.newest(lambda name: not name.startswith(f"{CODE}/"))
        resumed = Resumed(*found, rank) if found else None
        weights = run.spec.get("warm_start")
        self.latest_checkpoint: Path | None = resumed.folder if resumed else None
        """The folder of the checkpoint from which this process resumes, whose files are verified; later, that of the
        newest one that `checkpoint` or a stop has committed. None before the first.
        """
        self.warm_start: Path | None = Path(weights) if weights and not resumed else None
        """The folder of a checkpoint of another trial, with whose weights this trial starts: `track` loads those of
        models. None without one, and after a resume.
        """
        if self.warm_start:
            self._checkpoints.verify(self.warm_start)
        self._progress = resumed.progress if resumed else Progress()
        of_rank = resumed.of_rank if resumed else {}
        if resumed and not resumed.has_rank:  # all ranks continue the pass at the same batch
            of_rank = {"pass": of_rank.get("pass")}
        self._passes = Passes(
            of_rank, done=self._progress.position.done, seed=mixed_seed("loader", self.info.trial_seed, rank)
        )
        self._bodies = Bodies()
        self._repeated_tail = self._progress.tail
        """The tail in which the run was stopped, which begins at the next `batches`; "" if there is none."""
        self._wanted_passes: int | None = None
        """Number of passes that `epochs` was called with."""
        self._total_is_expected = False
        """Whether `total` follows from a length that the loop asked for; it is then replaced by that of the next."""
        self._tensorboard = TensorBoard(run.folder.tensorboard / f"rank-{rank}" if rank else run.folder.tensorboard)
        self._tensorboard.cut(of_rank.get("tensorboard", {}))
        self._reports = Reports(run.log, self._tensorboard) if self.distributed.is_chief else None
        portable = Portable(run.spec, run.job.code if run.job else None, trial_type="script")
        if resumed and self.distributed.is_chief:
            for problem in portable.mend(resumed.folder):
                print(f"hpc-det: warning: {problem}", flush=True)
        self._tracked = Tracked(self.distributed, portable, resumed, self.warm_start, self._of_rank)
        self._short: ShortRun | None = None
        """Ends `--test` and the trainings of verify-resume; None in other runs."""
        if run.purpose.test or run.purpose.forced_stops is not None:
            self._short = ShortRun(run, tracked=self._tracked, progress=self._progress, passes=self._passes)
            searcher = self._short.searcher(searcher)
        batch_size = self.hparams.get("global_batch_size")
        self._searching = Searching(run.job.searcher if run.job else None, searcher, self._progress, batch_size)
        if not self._searching.wants_training():
            self._stop = Stop("search")
        saver = CheckpointSaver(
            self._tracked,
            checkpointing,
            self.distributed,
            progress=self._progress,
            search=self._searching.search,
            log=self._reports or run.log,
        )
        self.profile = Profile(
            self.config.get("profiling") or {}, run.folder, run.attempt, self.distributed, self._progress
        )
        """Measures the loop if `profiling.enabled` is set; `with core.profile(name):` times a part of the body."""
        self.profile.measure(saver)
        if resumed:
            saver.resumed()
        self._saves = Saves(
            saver,
            checkpointing.save_schedule,
            period_from_config(self.config.get("min_checkpoint_period") or 0, batch_size),
            tracked=self._tracked,
            progress=self._progress,
            passes=self._passes,
        )
        self._continue_log()

    # --- state

    @property
    def step(self) -> int:
        """Number of batches trained, from the beginning of the trial; in the body of a loop over `batches`, the current
        one is included. A loop that does not use `batches` sets it with the step of its reports and checkpoints.
        """
        return self._progress.steps

    @property
    def epoch(self) -> int:
        """Number of passes that `batches` has completed. A loop that does not use `batches` sets it."""
        return self._progress.position.epoch - (self._repeated_tail == "pass")

    @epoch.setter
    def epoch(self, completed: int) -> None:
        self._progress.position = Position(completed, self._passes.done)

    @property
    def total(self) -> int | None:
        """Number of batches of the whole trial, which hpc-det shows beside the batches done; None: unknown.

        `search`, `epochs` and `batches` with `until` set it, if they can; any other loop may set it.
        """
        return self._reports.total if self._reports else None

    @total.setter
    def total(self, batches: int | None) -> None:
        self._total_is_expected = False
        if self._reports:
            self._reports.total = batches

    # --- passes

    def _continue_log(self) -> None:
        if self.distributed.is_chief:
            self._run.log.begin_at(trained=self.step, validated=self._progress.validated)
            if metric := self._searching.metric:
                self._searching.search.validations = self._run.log.validations(metric)

    def _check_batches(self, accumulate: int, *, is_pass: bool) -> None:
        """Raise UsageError if a pass cannot begin here. `is_pass`: `batches` without `until`."""
        if self._bodies.in_batch:
            raise UsageError(
                f"batches: called at batch {self.step} in the body of another `batches`, which counts the batches of "
                f"the training; iterate over the second loader itself"
            )
        if is_pass and self._bodies.in_epoch and self._bodies.has_pass:
            raise UsageError(
                f"batches: called a second time in the body of `epochs`, at batch {self.step}; iterate over the second "
                f"loader itself, such as one for a validation"
            )
        if accumulate < 1:
            raise UsageError(f"batches: accumulate is {accumulate}; give the number of batches of an optimizer step")

    def _passes_until(self, loader: Iterable[Any], unit: TrainUnit, accumulate: int) -> Iterator[Any]:
        """Yield the batches of passes up to a length."""
        if isinstance(unit, Batch) and self._may_expect:
            self._expect(unit.length)
        is_empty = False
        while not (self._stop or self._is_over or unit.reached(self._progress)):
            before = self.step
            yield from self._pass(loader, unit, accumulate)
            if self.step == before and is_empty and not self._stop:  # the rest of a resumed pass may be empty
                raise UsageError(
                    f"batches: the loader gives no batch in pass {self.epoch}, at batch {self.step} of {unit}; an "
                    f"iterator can be used once only: pass a DataLoader, or another object with an `__iter__`"
                )
            is_empty = self.step == before
            if not unit.reached(self._progress):
                self._end_body()
        if not self._stop:
            self._begin_tail("length")

    def _pass(self, loader: Iterable[Any], unit: TrainUnit | None, accumulate: int) -> Iterator[Any]:
        progress, passes, saves, bodies = self._progress, self._passes, self._saves, self._bodies
        batches = passes.open(loader, progress.position.epoch)
        if self._short:
            batches = self._short.batches(loader, batches, accumulate)
        batches = self.profile.over(batches, _records(loader))
        self._expect_total(loader, unit.length if isinstance(unit, Epoch) else self._wanted_passes)
        self._note_forgotten()
        try:
            with self._agreement.steps("training", progress.steps):
                for batch in batches:
                    passes.done += 1
                    progress.steps += 1
                    bodies.in_batch = True
                    yield batch
                    bodies.in_batch = False
                    if passes.done % accumulate:
                        continue
                    if bodies.asks:
                        self._end_body()
                        if self._stop:
                            return
                    is_reached = unit is not None and unit.reached(progress)
                    if is_reached:
                        self._begin_tail("length")
                    if self._tick():
                        self._stop_here()
                        return
                    if is_reached:
                        return
                    if progress.steps >= saves.next:
                        saves.do_what_is_due()
                if passes.done % accumulate and self._tick():
                    self._stop_here()
                    return
        except GeneratorExit:  # the loop has left the pass
            bodies.in_batch = False
            if unit is None and not self._stop:
                self._forget_total()
                self._end_pass()
                self._begin_tail("pass")
            raise
        self._end_pass()
        if unit is None:
            self._begin_tail("pass")

    def _expect_total(self, loader: Iterable[Any], passes: int | None) -> None:
        """Set `total` if the loop makes so many passes over the loader, whose length is known."""
        if self._reports and self._may_expect and passes and (length := length_of(loader)):
            self._expect(self.step - self._passes.done + (passes - self.epoch) * length)

    @property
    def _may_expect(self) -> bool:
        """Whether no one has set `total`: a later length of the same training replaces an expected one."""
        return self.total is None or self._total_is_expected

    def _expect(self, batches: int) -> None:
        self.total, self._total_is_expected = batches, True

    def _forget_total(self) -> None:
        if self._total_is_expected:
            self.total, self._wanted_passes = None, None

    def _note_forgotten(self) -> None:
        """Print which objects of the resumed checkpoint the loop no longer tracks, once."""
        names = self._tracked.forgotten()
        if names and self.distributed.is_chief:
            print(f"hpc-det: not tracked any more, so the next checkpoint lacks it: {', '.join(names)}", flush=True)

    # --- bodies

    def _end_pass(self) -> None:
        if self._saves.end_pass():
            self._bodies.wants_save = self._bodies.asks = True

    def _begin_tail(self, kind: str) -> None:
        """Keep the state here, from which a run that is stopped in the rest of the body resumes."""
        progress = self._progress
        progress.tail = kind
        self._passes.restore_generators()
        self._bodies.tail = Tail(rng=rng_state(), validated=progress.validated, best=progress.best)

    def _leave_tail(self) -> None:
        self._bodies.tail, self._progress.tail = None, ""

    def _end_body(self) -> None:
        """Do what the body that has ended has asked for. Nothing after a stop: the resumed run repeats the body."""
        bodies = self._bodies
        if self._stop:
            return
        self._leave_tail()
        asks, wants_save, reports = bodies.asks, bodies.wants_save, bodies.after_save
        bodies.asks, bodies.wants_save, bodies.after_save = False, False, []
        if reports or self._stop is REPORT_WAITS:
            self._saves.save_and_wait()
            for report in reports:
                report()
        elif asks and wants_save:
            self._saves.save()
        if self._stop is REPORT_WAITS:
            self._report_to_search()

    def _save_soon(self) -> None:
        """Save now or, in the middle of a body, when that has ended."""
        if self._bodies.is_one_open:
            self._bodies.wants_save = self._bodies.asks = True
        else:
            self._saves.save()

    def _of_rank(self) -> dict[str, Any]:
        """Return what this rank's file contains besides tracked objects."""
        tail = self._bodies.tail
        return {
            "rng": tail.rng if tail else self._passes.rng,
            "pass": self._passes.state(),
            "tensorboard": self._tensorboard.position(),
        }

    def _meet(self, call: str) -> None:
        self._meetings.meet(call)

    def _stop_here(self) -> None:
        """Save the tracked objects at the first agreed stop, and find out its reason. Collective."""
        if self._stop is REPORT_WAITS and not self._bodies.is_one_open:
            self._report_to_search()
        if self._stop or not self._agreement.stopped:
            return
        self._meet("stop")
        here = stop_of(self._stop_request() if self.distributed.is_chief else None, self._agreement.deadline)
        # a loop that does not use `batches` may report on rank 0 alone, and then only rank 0 knows the step
        reason, deadline, self._progress.steps = self.distributed.broadcast_json(
            [here.reason, here.deadline, self.step]
        )
        self._stop = Stop(reason, deadline)
        if tail := self._bodies.tail:
            self._progress.validated, self._progress.best = tail.validated, tail.best
        if self._reports:
            self._reports.write()
        self._saves.save_the_rest(self._agreement)
        self._note_saved()

    def _stop_request(self) -> StopRequest | None:
        if self._short and (forced := self._short.stop_request()):
            return forced
        return read_stop(self._run.folder.stop, self._run.attempt)

    @property
    def _is_over(self) -> bool:
        """Whether a short run has its length."""
        return self._short is not None and self._short.is_over

    def _reach(self, step: int) -> None:
        """Count the steps of a loop that does not use `batches`, and allocate the memory of its first save."""
        if self._bodies.uses_batches and step != self.step:
            raise UsageError(
                f"report: step is {step}, but `batches` has counted {count(self.step, 'batch')}; pass core.step, and "
                "report another count as a metric"
            )
        self._progress.steps = max(self._progress.steps, step)
        saver = self._saves.saver
        if self._progress.steps >= saver.next_expectation and self._tracked:
            saver.expect()

    def _validate(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._meet(f"report of group validation at batch {step}")
        own = spelled({name: plain(value) for name, value in metrics.items()}) if self._reports else None
        metrics = self.distributed.broadcast_json(own)
        self._searching.take(metrics)
        self._progress.validated = self.step
        if self._reports:
            self._reports.validation(step, metrics)
        policy = self.config.get("checkpoint_policy", "best")
        if self.step and (policy == "all" or (policy == "best" and self._searching.search.improved)):
            if self._tracked:
                self._save_soon()
            else:
                self._saves.want()
        if self._searching.wants_report():
            # a report is made once, so its batch must not be lost afterwards
            self._stop, self._bodies.asks = REPORT_WAITS, True
            if not self._tracked:
                self._saves.want()
            elif not self._bodies.is_one_open:
                self._end_body()

    def _report_to_search(self) -> None:
        self._stop = NO_STOP if self._searching.report() else Stop("search")

    def _note_saved(self) -> None:
        newest = self._checkpoints.saved
        path = self.distributed.broadcast_json(str(newest.path) if newest else None)
        self.latest_checkpoint = Path(path) if path else self.latest_checkpoint


def _records(loader: object) -> int:
    """Return the number of records in a batch of this loader; 0 if it is unknown."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else 0


def _kept(config: Mapping[str, Any]) -> Policy:
    """Return the retention outside a job: of the configuration, or that of an experiment."""
    return Policy.of({**_DEFAULT_KEPT, **(config.get("checkpoint_storage") or {})})


_DEFAULT_KEPT = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
