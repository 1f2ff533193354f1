"""The record of a gang's training in its experiment: attempts, metrics, and the end. An attempt is one gang."""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hpc_det.checkpoint.committed import newest_steps
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.files import make_folders
from hpc_det.node.json_files import append_line, write_json
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.sgd.driver.experiment import AGAIN, Description, DriverExperiment, has_own_experiment, opened_experiment
from hpc_det.sgd.driver.failures import GangLost, Hung, JobLeaves, NodeLost, Preempted, was_terminated
from hpc_det.sgd.operator.options import BATCH_COUNT, EPOCH_IDX, NUM_SAMPLES
from hpc_det.store.attempt import StopRequest, failure_now, note_failure, read_stop
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import each as each_report
from hpc_det.store.metrics import in_json, numbers_in, reports_of
from hpc_det.store.run_folder import DriverRun, link_logs

_log = logging.getLogger("hpc_det.sgd")
Do = TypeVar("Do", bound=Callable[..., None])

WORKER, TRIAL = 0, 1
"""Numbers in the search, whose only worker is the driver and whose only trial is the training."""
_COUNTS = ("epoch", BATCH_COUNT, NUM_SAMPLES, EPOCH_IDX)
"""Keys of results that are not metrics."""
_CAUSES = {NodeLost: Cause.NODE_LOST, Hung: Cause.HUNG, Preempted: Cause.PREEMPTED}


def _harmless(do: Do) -> Do:
    """Return the method, which logs an error of its files: the training does not need the record."""

    @functools.wraps(do)
    def done(self: RunRecord, *arguments: Any, **more: Any) -> None:
        with self._lock:
            if self._experiment is None:
                return
            try:
                do(self, *arguments, **more)
            except (OSError, HpcDetError) as error:
                _log.warning("experiment %d: %s", self._experiment.folder.id, error)

    return done  # type: ignore[return-value]


class RunRecord:
    """The record of one driver. Without an experiment, its methods do nothing."""

    def __init__(
        self, experiment: DriverExperiment | None = None, *, is_of_loop: bool = False, is_temporary: bool = False
    ) -> None:
        """`is_of_loop`: the gang runs a training loop of `fit`, whose reports take the place of batches."""
        self._experiment = experiment
        self._is_temporary = is_temporary
        self._is_of_loop = is_of_loop
        self._lock = threading.RLock()
        self._has_stopped = False
        """Whether a command has stopped this driver: its end is recorded already."""
        self.last_attempt = 0
        """Number of the last gang of the run, of this driver or an earlier one."""
        self._failed: BaseException | None = None
        """The exception with which the last call ended; None if it has returned."""
        self._steps: list[tuple[int, int, str]] = []
        """For each report: the number of `train` calls or reports until then, the batches, and its kind."""
        if experiment:
            self._search = SearchJournal(experiment.folder)
            self._trial = experiment.folder.trial(TRIAL)
            self._journal = Journal(self._trial.journal)
            self.last_attempt = self._journal.last_attempt()

    @_harmless
    def begin(self, hparams: Mapping[str, Any]) -> None:
        """Record that this driver continues or begins the run."""
        assert self._experiment
        self._trial.create()
        self._trial.stop.unlink(missing_ok=True)  # a request to an earlier driver
        self._claim(self._experiment.job_id)
        write_json(self._trial.trial, self._spec(hparams), private=True)
        self._steps = [
            (int(report["call"]), int(report["steps"]), str(report["kind"]))
            for report in reports_of(each_report(self._trial.metrics))
        ]
        self._close_attempt(Cause.FAILED, "its driver exited without reporting a cause (killed or crashed)", late=True)
        _open_records.add(self)
        self._experiment.watch(self._look)

    def _spec(self, hparams: Mapping[str, Any]) -> dict[str, Any]:
        assert self._experiment
        number = self._experiment.folder.id
        return {"experiment_id": number, "trial_id": TRIAL, "trial_seed": 0, "hparams": dict(hparams), "config": {}}

    def _claim(self, job_id: str) -> None:
        search = self._search.state()
        if not search.submissions:
            self._search.submitted(WORKER, 1, stay=True)
        elif search.finished:
            self._search.continue_([TRIAL])
        elif search.paused:
            self._search.activate()
        self._search.ask(WORKER, job_id)

    @_harmless
    def gang_begins(self, attempt: int, calls: int) -> None:
        """Record that a gang is being formed. `calls`: number of `train` calls in the state that it starts from."""
        assert self._experiment
        if self._failed is None:
            self._close_attempt(Cause.PREEMPTED, "the gang is formed again with another size")
        else:
            self._close_attempt(Cause.FAILED, _text_of(self._failed))
        self._failed = None
        verdict = self._journal.verdict()
        if verdict and verdict[1] in (Action.DONE, Action.GIVE_UP):
            self._journal.continued()
        self._journal.started(attempt, self._experiment.job_id, WORKER)
        self.last_attempt = attempt
        if not self._is_of_loop:
            self.starts_from(calls)

    @_harmless
    def gang_formed(self, hosts: Sequence[str]) -> None:
        """Record the hosts of the gang, one for each rank."""
        nodes = self._trial.nodes(self.last_attempt)
        make_folders(nodes.parent)
        write_json(nodes, list(dict.fromkeys(hosts)))

    @_harmless
    def starts_from(self, calls: int) -> None:
        """Record that the gang starts from the state after so many `train` calls or reports: later ones are void."""
        self._steps = [known for known in self._steps if known[0] <= calls]
        trained, validated = (self._batches(kind) for kind in ("training", "validation"))
        begins = {"kind": "begins", "attempt": self.last_attempt, "trained": trained, "validated": validated}
        append_line(self._trial.metrics, {**begins, "time": time.time()}, durable=False)

    def _batches(self, *kinds: str) -> int:
        return next((steps for _, steps, kind in reversed(self._steps) if kind in kinds), 0)

    @_harmless
    def gang_lost(self, lost: GangLost) -> None:
        """Record that the gang was lost, and that another one will be formed."""
        cause = next((cause for kind, cause in _CAUSES.items() if isinstance(lost, kind)), Cause.FAILED)
        self._close_attempt(cause, str(lost))

    def call_failed(self, error: BaseException) -> None:
        """Record the exception with which a call has ended."""
        self._failed = error

    @_harmless
    def call_made(self, method: str, calls: int, result: Any) -> None:
        """Record the result of `train` or `validate`; `calls`: number of `train` calls until then."""
        kind = {"train": "training", "validate": "validation"}.get(method)
        result = result[0] if isinstance(result, list) and result else result  # reduce_results=False: that of rank 0
        if kind is None or not isinstance(result, Mapping):
            return
        steps = self._batches("training", "validation")
        if kind == "training":
            steps += _count_in(result)
        self._report(kind, calls, steps, result)

    @_harmless
    def reported(self, report: int, metrics: Mapping[str, Any]) -> None:
        """Record a report of a training loop of `fit`, whose reports take the place of batches."""
        self._report("validation", report, report, metrics)

    def _report(self, kind: str, call: int, steps: int, result: Mapping[str, Any]) -> None:
        line = {"kind": kind, "steps": steps, "total": None, "metrics": numbers_in(result, but=_COUNTS), "call": call}
        append_line(self._trial.metrics, {**line, "attempt": self.last_attempt, "time": time.time()}, durable=False)
        self._steps.append((call, steps, kind))

    def end(self, error: BaseException | None) -> None:
        """Record the end of this driver. `error`: the exception that has ended it; None: it has finished."""
        _open_records.discard(self)
        self._record_end(error or self._failed)
        if self._experiment:
            self._experiment.end()
            self._experiment = None

    @_harmless
    def _record_end(self, error: BaseException | None) -> None:
        if self._has_stopped:
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0) and not was_terminated()):
            self._close(Cause.FINISHED, Action.DONE, None)
        elif isinstance(error, KeyboardInterrupt):
            self._cancel("Ctrl-C")
        elif isinstance(error, JobLeaves):
            self._pause("the scheduler, which takes its nodes")
        elif isinstance(error, SystemExit) and was_terminated():
            self._pause("SIGTERM")
        else:
            self._close(Cause.FAILED, Action.GIVE_UP, error)

    def _cancel(self, source: str) -> None:
        self._search.cancel(source)
        self._close(Cause.CANCELLED, Action.DONE, None)

    def _pause(self, source: str) -> None:
        """Record a pause; of a temporary run, which cannot resume, the end."""
        assert self._experiment
        if self._is_temporary:
            self._cancel(source)
            return
        if not self._search.state().paused:
            self._search.pause(source)
        self._close_attempt(Cause.PAUSED, None, action=Action.PAUSE)
        self._search.lose(WORKER, self._experiment.job_id)

    def _close(self, cause: Cause, action: Action, error: BaseException | None) -> None:
        failure = None
        if error is not None:
            failure = _text_of(error)
            is_permanent = isinstance(error, UsageError) or not isinstance(error, HpcDetError)
            noted = failure_now(None, failure, traceback=str(error.__cause__ or ""), user_error=is_permanent)
            note_failure(self._trial, self.last_attempt, noted)
        self._close_attempt(cause, failure, action=action)
        how = {Cause.FINISHED: Exit.COMPLETED, Cause.CANCELLED: Exit.CANCELLED}.get(cause, Exit.FAILED)
        self._search.end(WORKER, TRIAL, how)
        self._search.leave(WORKER)

    def _close_attempt(
        self, cause: Cause, failure: str | None, *, action: Action = Action.RESTART, late: bool = False
    ) -> None:
        """Record the end of the attempt that has started and not ended, if there is one."""
        if (attempt := self._journal.open_attempt()) is None:
            return
        steps = max(self._batches("training", "validation"), newest_steps(self._trial.checkpoints))
        why = cause.value if action is Action.DONE else AGAIN
        if action is Action.RESTART:
            why = "the program was started again" if late else "the call is repeated"
        self._journal.ended(attempt, AttemptEnd(cause=cause, steps=steps), Decision(action, why), failure, late=late)

    # --- stop requests

    def _look(self) -> None:
        """Obey a stop request of a command: record the end, and end this process by a signal."""
        with self._lock:
            if self._experiment is None or self._has_stopped:
                return
            if (stop := read_stop(self._trial.stop, self.last_attempt)) is None:
                return
            number = self._experiment.folder.id
            if stop.reason != "kill":
                self._stop(stop)
        for other in [*_open_records]:  # without the lock, as this may be done at the same time for another record
            other.process_ends(f"`{stop.reason}` of experiment {number}, whose driver is the same process")
        if stop.reason == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"hpc-det: experiment {number}: {stop.reason} by {stop.source}", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    def _stop(self, stop: StopRequest) -> None:
        """Record the end that a command requests."""
        assert self._experiment
        self._has_stopped = True
        if stop.reason == "cancel":
            self._close(Cause.CANCELLED, Action.DONE, None)
        else:
            self._pause(stop.source)
        self._experiment.end()

    @_harmless
    def process_ends(self, source: str) -> None:
        """Record the end of this process by a command for another of its records, or for this one as well."""
        assert self._experiment
        own = read_stop(self._trial.stop, self.last_attempt)
        if not self._has_stopped and not (own and own.reason == "kill"):  # the command records a kill
            self._stop(own or StopRequest(attempt=None, reason="pause", source=source, time=time.time()))


_open_records: weakref.WeakSet[RunRecord] = weakref.WeakSet()
"""The records of this process that have not ended."""


def begin_record(run: DriverRun, about: Description, *, is_of_loop: bool) -> RunRecord:
    """Return the record of the run, which this process must have claimed."""
    if not has_own_experiment(os.environ):
        return RunRecord()

    def link(experiment: ExperimentFolder) -> None:
        trial = experiment.trial(TRIAL)
        for folder in (experiment.search, trial.path.parent, trial.path):
            folder.mkdir(mode=0o700, exist_ok=True)
        if is_of_loop:
            trial.checkpoints.symlink_to(run.folder.path / "checkpoints")

    experiment = opened_experiment(run.folder.path, about, link=link)
    record = RunRecord(experiment, is_of_loop=is_of_loop, is_temporary=run.is_temporary and not is_of_loop)
    if experiment:
        link_logs(run.folder.path, experiment.folder.trial(TRIAL).logs)
        record.begin(in_json(dict(about.hparams)))
    return record


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, HpcDetError) else f"{type(error).__name__}: {error}"


def _count_in(result: Mapping[str, Any]) -> int:
    """Return the batches of a result of `train`; 1 if it does not contain their number."""
    count = result.get(BATCH_COUNT)
    # numpy.float64 is a subclass of float
    return int(count) if isinstance(count, (int, float)) and math.isfinite(count) else 1
