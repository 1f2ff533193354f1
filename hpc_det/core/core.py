"""One rank's view of its training: what any loop needs to report, save, resume, stop and take part in a search."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hpc_det.core.loop import Loop
from hpc_det.core.progress import Batch, TrainUnit
from hpc_det.core.search import Operation
from hpc_det.core.stop import NO_STOP, REPORT_WAITS, Stop
from hpc_det.distributed.metrics import plain
from hpc_det.errors import UsageError


class Core(Loop):
    """One rank's view of its training; `hpc_det.core.init` creates it.

    Every rank calls `track`, `batches`, `should_stop`, `checkpoint`, `save`, `search`, and `report` of group
    "validation" or with `checkpoint=True`, in the same order. Other reports may be made on rank 0 alone, whose values
    are the ones that are recorded.
    """

    # --- objects

    def track(self, *, per_rank: bool = False, **objects: Any) -> None:
        """Save the state of `objects` with every checkpoint, and restore it now if this process resumes from one.

        An object has `state_dict` and `load_state_dict`, or is a dict. `per_rank`: it differs between ranks; otherwise
        rank 0 saves it for all. Models that torch's fully_shard has sharded are saved and restored in parts. Pass a
        model in DistributedDataParallel as such: then it rounds sums after a resume as it did before.

        Raises UsageError for an object without a state, a name that is tracked already, and a name that the checkpoint
        lacks; HpcDetError for a state that no checkpoint can hold.
        """
        self._meet("track per rank" if per_rank else f"track of {', '.join(objects)}")
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
        If the run was stopped behind the end of a pass, in the rest of the body around it, a resume yields no batch of
        that pass, so that the rest of the body is repeated.

        Raises UsageError in the body of another `batches`, for a second pass in the body of `epochs`, and with `until`
        if the loader gives no batch.
        """
        unit, bodies = _unit(until), self._bodies
        self._check_batches(accumulate, is_pass=unit is None)
        bodies.uses_batches = True
        if not bodies.in_epoch:  # otherwise the body ends in `epochs`
            self._end_body()
        bodies.has_pass |= unit is None
        tail, self._repeated_tail = self._repeated_tail, ""
        if tail and not (isinstance(until, Operation) and not until.is_reached):
            self._begin_tail(tail)
        elif unit:
            yield from self._passes_until(loader, unit, accumulate)
        elif not (self._stop or self._is_over):
            yield from self._pass(loader, None, accumulate)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the number of each pass that is still to be done, from `epoch` to `count` - 1, until an agreed stop.

        The body iterates over `batches` once. What it asks for, such as a save, is done when it has ended. After a
        resume in the middle of a pass, or in the rest of the body behind it, that pass comes first.
        """
        self._wanted_passes, bodies = count, self._bodies
        while (epoch := self.epoch) < count and not self._stop and not self._is_over:
            bodies.in_epoch, bodies.has_pass = True, False
            try:
                yield epoch
            finally:
                bodies.in_epoch = False
            if self._stop:
                return
            if not bodies.has_pass:
                self._end_pass()
            self._end_body()

    def stepping(self) -> AbstractContextManager[None]:
        """Mark a loop that calls `should_stop` once per step, so that a rank that hangs in a step is detected.

        Every rank runs the loop. `batches` does this by itself.
        """
        return self._agreement.steps("training", self.step)

    def should_stop(self) -> Stop:
        """Return whether the loop must end, and why. Without a stop it takes less than a microsecond.

        Call it after each step, equally often on every rank: all ranks get the same answer at the same call. The first
        call whose answer is true saves the tracked objects before it returns. In the body of `batches` there is no new
        answer, since the iteration itself ends at a stop, after the body.
        """
        if self._bodies.in_batch:
            return self._stop
        if self._short:
            self._short.called()
        if self._tick() or self._stop is not NO_STOP:
            self._stop_here()
            return self._stop
        if self._short and self._is_over:
            self._meet(f"end of a short run at batch {self.step}")
            self._saves.save_and_wait()
            return Stop("search")
        return NO_STOP

    def restore_generators(self) -> None:
        """Set this rank's random generators as they were at the resumed checkpoint. `batches` does this by itself.

        A loop that does not use `batches` calls this after it has fetched its first batch, since starting a loader
        draws random numbers. Further calls do nothing.
        """
        self._passes.restore_generators()

    # --- reports

    def report(
        self, step: int, metrics: Mapping[str, Any], *, group: str = "training", checkpoint: bool = False
    ) -> None:
        """Report metrics after `step` batches. Only rank 0's values are recorded.

        Tensors and arrays become numbers and lists; values that JSON cannot represent become null.

        `group`: "training", "validation", or any other name. Every rank must report validations: the search and the
        retention of checkpoints use the metric that `searcher.metric` names. After a stop, validations are ignored,
        since the resumed run repeats them. `checkpoint`: save the tracked objects first, so that the checkpoint exists
        when the metrics are visible; in the body of `batches`, `epochs` or `search` both are done when it has ended.

        Raises UsageError if a search compares trials and the validation lacks its metric, and for another step than
        that of `batches`.
        """
        if checkpoint or group in ("training", "validation"):
            self._reach(step)  # the step of another group may count something else
        if self._short and group != "validation":
            self._short.reported(group, metrics)
        if checkpoint and not self._stop:
            self._meet(f"report with a checkpoint at batch {step}")
            if self._bodies.is_one_open:
                kept = {name: plain(value) for name, value in metrics.items()}
                self._bodies.after_save.append(partial(self._write_report, step, kept, group))
                self._bodies.asks = True
                return
            self._saves.save_and_wait()
        self._write_report(step, metrics, group)

    def _write_report(self, step: int, metrics: Mapping[str, Any], group: str) -> None:
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

        The body trains to each length and reports a validation there; the search then decides about the next one. If
        the searcher compares no trials, or outside a job, there is one length, that of `searcher.max_length`. Raises
        UsageError if that is not set, and if the body ends before the length or without a validation.
        """
        searching = self._searching
        while not self._stop and (operation := searching.operation()):
            if isinstance(operation.until, Batch) and self._may_expect:
                self._expect(operation.until.length)
            if operation.is_reached and self._progress.validated == self.step and not self._repeated_tail:
                if not searching.compares:  # a finished trial is started again
                    return
                self._report_to_search()  # the run was killed between the save and the report
                continue
            before = self._progress.validated, searching.reports
            self._bodies.in_operation = True
            try:
                yield operation
            finally:
                self._bodies.in_operation = False
            self._end_body()
            if self._stop:
                return
            searching.check(operation, is_reported=before != (self._progress.validated, searching.reports))
            if not searching.compares:
                return

    # --- checkpoints

    def save(self) -> None:
        """Save the tracked objects. Training continues while the checkpoint is written.

        In the body of `batches`, `epochs` or `search`, the save is made when that has ended, so that a resume neither
        repeats nor loses a part of it.

        Raises UsageError if no object is tracked.
        """
        self._meet(f"save at batch {self.step}")
        if not self._tracked:
            raise UsageError("save: no object is tracked; call track before, or write the files in core.checkpoint")
        self._save_soon()

    @contextmanager
    def checkpoint(self, step: int | None = None, *, metadata: Mapping[str, Any] | None = None) -> Iterator[Path]:
        """Yield a folder into which every rank writes its files; on leaving the block, the checkpoint is committed.

        The folder is the same on all ranks, so they write files with different names. The tracked objects and the
        random generators are added. After an exception on any rank nothing is committed. A resume continues behind the
        body in which the block is, so it comes last there. `step`: number of batches
        trained, `core.step` by default. `metadata`: entries of metadata.json; JSON values.

        Raises UsageError if ranks pass different steps, and HpcDetError if another rank failed.
        """
        self._reach(self.step if step is None else step)
        if not self._stop:
            self._leave_tail()
        call = f"checkpoint at batch {self.step}"
        self._meet(call)
        self._tracked.metadata = metadata or {}
        try:
            with self._saves.around() as folder:
                try:
                    yield folder
                except BaseException as error:
                    if self.distributed.size > 1:  # printed before the wait, since other ranks may hang
                        failed = f"rank {self.distributed.rank} failed in {call}"
                        print(f"hpc-det: {failed}: {type(error).__name__}: {error}", flush=True)
                    self._meetings.meet(call, failed=True)
                    raise
                self._meet(call)
        finally:
            self._tracked.metadata = {}
        self._note_saved()
        if self._stop is REPORT_WAITS:
            self._report_to_search()

    def is_checkpoint_due(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step` batches; the same on every rank, which all call it.

        It is due by `min_checkpoint_period`, `checkpoint_interval`, or a validation that `checkpoint_policy` keeps. For
        loops that write all files themselves: tracked objects are saved without it in `batches` and `report`.
        """
        self._reach(step)
        return self._saves.is_due()

    @property
    def tensorboard_path(self) -> Path:
        """The folder of this rank's TensorBoard event files."""
        return self._tensorboard.folder

    # --- called by init

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """End this object's threads; if the block raises, wait for a save in flight as long as there is time."""
        try:
            with self._saves.saver.finishing(self._agreement):
                yield
        finally:
            self.profile.close()
            if self._reports:
                self._reports.close()

    def finish(self) -> None:
        """Save what is unsaved, and write the outcome. Collective."""
        self._meet("leaving the block of init")
        self._progress.steps = self.distributed.broadcast_json(self.step)
        self._end_body()
        if self._reports:
            self._reports.write()
        self._saves.save_the_rest(self._agreement)
        end = "stopped" if self._agreement.stopped else self._searching.end()
        saver = self._saves.saver
        self._tensorboard.close()
        self._passes.close()
        if end == "stopped" and not saver.is_saved and self.distributed.is_chief:
            why = "its deadline left no time to save" if self._tracked else "no object is tracked; see core.track"
            print(f"hpc-det: warning: stopped at batch {self.step} without a checkpoint of it: {why}", flush=True)
        if self._searching.lacks_metric and self.distributed.is_chief:
            metric = self._searching.metric
            print(f"hpc-det: note: searcher.metric {metric!r} was not among the metrics of a validation", flush=True)
        self._run.write_outcome(end, self.step, saved=saver.is_saved)
        if end == "finished":
            if self._short:
                self._short.end(self._checkpoints.saved)
            saver.prune_all()  # after the outcome: a trial that is killed in between must not train again


def _unit(until: Operation | TrainUnit | int | None) -> TrainUnit | None:
    """Return the length that `batches` is asked for. Raises UsageError for anything else."""
    if until is None or isinstance(until, TrainUnit):
        return until
    if isinstance(until, Operation):
        return until.until
    try:
        return Batch(operator.index(until))  # also a number of numpy
    except TypeError:
        raise UsageError(
            f"batches: until is {until!r}; give a number of batches, Batch(n), Epoch(n) or an operation of core.search"
        ) from None
