"""The driver of a search: assigns trials to slots, reports their results to the searcher, restarts trials that died.

Its decisions depend only on the journal of the search and on the files of the trials, so that another driver can
continue the search if this one is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_det.checkpoint.committed import committed
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.process import uninterrupted
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.schedulers.local import JobId
from hpc_det.schedulers.scheduler import CommandError
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.search.population import Population
from hpc_det.search.state import SearchState
from hpc_det.sgd.driver.experiment import AGAIN
from hpc_det.sgd.tune.files import DONE, ITERATION, TuneFolder, TuneTrial, Turn
from hpc_det.sgd.tune.places import Process, TrialPlace
from hpc_det.store.attempt import StopRequest, read_stop
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import number_or_nan

log = logging.getLogger(__name__)

REFUSED_S = 30.0
"""Seconds until a job that the scheduler rejected is submitted again: the reason may be a limit on running jobs."""
LEAVES_S = 5.0
"""Seconds that a process without another turn may take to exit before it is ended."""
LOOK_S, REQUESTED_S = 1.0, 1.0
"""Seconds between two looks for killed trials, and seconds to wait for the stop requests of a command that has ended
the search."""
COPIES = 5
"""Number of attempts to copy a checkpoint: the trial that owns it may delete it during the copy."""


class SearchStopped(HpcDetError):
    """A command such as `hpc-det experiment pause` has stopped the search."""


@dataclass
class Slot:
    """A place for the process of one trial at a time. In the journal it is a worker, with the same number."""

    number: int
    trial: TuneTrial | None = None
    process: Process | None = None
    work: Work | None = None
    """The work that was assigned to the slot; None if there was none for it."""
    let_go_at: float | None = None
    """time.monotonic() after which the process is ended, if it was asked to exit; None if not."""
    begins_at: float = 0.0
    """time.monotonic() before which no process is started."""


class TuneDriver:
    """The driver of one search."""

    def __init__(
        self,
        run: TuneFolder,
        place: TrialPlace,
        *,
        max_failures: float,
        turns: Mapping[str, Any],
        progress: Callable[[SearchState], None] = lambda state: None,
    ) -> None:
        """`max_failures`: math.inf for no limit; `turns`: the fields of Turn that are the same for all trials;
        `progress` shows the state of the search.
        """
        self._run = run
        self._place = place
        self._max_failures = max_failures
        self._turns = turns
        self._journal = SearchJournal(run)
        self._metric: str | None = turns["keep"].get("metric")
        self._job = str(JobId.of(os.getpid()))
        """Id of this driver, which the journals have in the place of a worker's job."""
        self._progress = progress
        self._next_look = 0.0
        """time.monotonic() of the next look for requests of `trial kill`."""
        self._slots = [Slot(number) for number in range(place.slots)]

    def drive(self) -> None:
        """Run the search to its end. If an exception ends it, the processes of the trials are ended too.

        Raises HpcDetError if the searcher gives up, and SearchStopped at the request of a command.
        """
        is_killed = False
        try:
            self._take_over()
            while self._goes_on():
                self._end_killed_trials()
                for slot in self._slots:
                    self._look_at(slot)
                self._progress(self._journal.state())
                time.sleep(self._place.poll_s)
            if problem := self._journal.state().given_up:
                raise HpcDetError(problem)
        except SearchStopped:
            is_killed = self._is_killed()
            raise
        except BaseException as error:
            self._journal.cancel(
                "Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"an error: {type(error).__name__}"
            )
            raise
        finally:
            self._end_all()
            if is_killed:  # the command waits for the end of this process
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_killed(self) -> bool:
        """Return whether the command that has stopped the search is a `kill`, which writes that a little later."""
        trials = [slot.trial for slot in self._slots if slot.trial]
        end = time.monotonic() + REQUESTED_S
        while time.monotonic() < end:
            if any(stops := [_stop_of(trial) for trial in trials]):
                return any(stop and stop.reason == "kill" for stop in stops)
            time.sleep(self._place.poll_s)
        return False

    def _end_killed_trials(self) -> None:
        """End the trials that `hpc-det trial kill` has named."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        for slot in self._slots:
            stop = _stop_of(slot.trial) if slot.trial and slot.work else None
            if stop and stop.reason == "kill" and slot.trial and slot.work:
                _note(slot.trial, error=f"killed by {stop.source}")
                slot.trial.stop.unlink(missing_ok=True)
                self._go_on_with(slot, self._journal.end(slot.number, slot.work.trial, Exit.CANCELLED))
                if slot.process:
                    slot.process.end()

    def _take_over(self) -> None:
        """Record the slots in the journal. If an earlier driver had more slots, the work in those is queued again."""
        state = self._journal.state()
        if state.cancelled or state.paused:
            self._journal.continue_([])
        for work in state.open.values():
            self._run.trial(work.trial).stop.unlink(missing_ok=True)  # a request to an earlier driver
        self._journal.submitted(0, max(state.workers, len(self._slots)), stay=True)
        for worker, job in list(state.present.items()):
            if worker >= len(self._slots):
                self._journal.lose(worker, job)

    def _goes_on(self) -> bool:
        """Request work for idle slots; return whether any slot has work or a process.

        Raises SearchStopped if a command has paused or ended the search.
        """
        state = self._journal.state()
        if source := state.cancelled or state.paused:
            what = "ended" if state.cancelled else "paused"
            raise SearchStopped(f"{source} has {what} this search; tune_run with the same run resumes it")
        for slot in self._slots:
            if slot.process is None and slot.work is None and (slot.number in state.open or self._has_work()):
                slot.work = self._journal.ask(slot.number, self._job)
        return any(slot.process or slot.work for slot in self._slots)

    def _has_work(self) -> bool:
        """Return whether the searcher has work for another slot."""
        state = self._journal.state()
        work = state.method.next_work()
        return work is not None and (work.trial in state.trials or not state.given_up)

    def _look_at(self, slot: Slot) -> None:
        """Start, follow or end the process of a slot."""
        if slot.let_go_at is not None:
            self._let_go(slot)
        elif slot.process is None and slot.work and time.monotonic() >= slot.begins_at:
            self._begin(slot, slot.work)
        elif slot.process and slot.work:
            self._follow(slot, slot.process, slot.work)

    def _begin(self, slot: Slot, work: Work) -> None:
        """Start the work in a process, or report its result at once if it exists already."""
        trial = slot.trial = self._run.trial(work.trial)
        trial.create()
        turn = self._next_turn(trial, work)
        # A job may have done the work while no driver ran.
        if (result := trial.newest()) and _is_at_end(result, work):
            self._report(slot, work, result)
            return
        job = _status(trial).get("job")
        if job and (found := self._place.found(job)) and found.is_running():
            slot.process = found
            _give(trial, turn)
            return
        trial.outcome.unlink(missing_ok=True)
        turn = replace(turn, process=turn.process + 1)
        _give(trial, turn)
        self._start(slot, trial, turn.process)

    @uninterrupted()
    def _start(self, slot: Slot, trial: TuneTrial, number: int) -> None:
        """Start a process, and record its job, or try again later if the scheduler rejects it.

        Raises CommandError if it rejects the job while no other runs.
        """
        # Uninterrupted: a Ctrl-C between start and record would leave a job that no driver knows.
        try:
            slot.process = self._place.start(slot.number, trial, number)
        except CommandError as refused:
            if not any(other.process for other in self._slots):
                raise
            log.warning("trial %s: %s; submitting it again in %g s", trial.id, refused, REFUSED_S)
            slot.begins_at = time.monotonic() + REFUSED_S
        else:
            _note(trial, job=slot.process.job)
            self._close(trial, Cause.FAILED, Action.RESTART, "its driver was killed or lost", late=True)
            if Journal(trial.journal).last_attempt() < number:
                Journal(trial.journal).started(number, self._job, slot.number)

    def _follow(self, slot: Slot, process: Process, work: Work) -> None:
        """Report the result of the work if the process has written it, or handle the exit of the process."""
        assert slot.trial
        has_ended = not process.is_running()  # before reading the result: it may write one and exit in between
        result = slot.trial.newest()
        if result and _is_at_end(result, work):
            slot.process = None if has_ended else process
            self._report(slot, work, result)
        elif has_ended:
            slot.process = None
            self._after_end(slot, slot.trial, work, process)

    def _report(self, slot: Slot, work: Work, result: dict[str, Any]) -> None:
        """Report a result to the searcher, and continue with the work that it returns."""
        if self._metric is not None and self._metric not in result:
            raise UsageError(
                f"metric {self._metric!r}: trial {work.trial} did not return it; it returned {sorted(result)}"
            )
        log.info("trial %d at iteration %d: %s", work.trial, result[ITERATION], result.get(self._metric or ""))
        value = number_or_nan(result.get(self._metric)) if self._metric else 0.0  # without a metric all are equal
        following = self._journal.report(slot.number, work, value)
        self._copy_source(work.trial)
        self._go_on_with(slot, following)

    def _after_end(self, slot: Slot, trial: TuneTrial, work: Work, process: Process) -> None:
        """Handle a process that exited before the end of its turn: it left without a failure, raised, or died.

        The trial ends if its code raised an exception, or if processes have died more than `max_failures` times.
        """
        outcome = read_json(trial.outcome) or {}
        if outcome.get("kind") == "left":  # not a failure: the slot keeps its work, which starts another process
            self._close(trial, Cause.PREEMPTED, Action.RESTART)
            return
        failures = _status(trial).get("failures", 0) + 1
        own_log = trial.rank_log(Journal(trial.journal).last_attempt(), 0)
        its_log = own_log if own_log.exists() else process.log
        error = outcome.get("error") or f"its process died (failure {failures}); see {its_log}"
        log.warning("trial %d: %s", work.trial, error)
        _note(trial, failures=failures, error=error, traceback=outcome.get("traceback"))
        # Without an outcome the process died: the slot keeps its work, which starts another process.
        if not outcome and failures <= self._max_failures:
            self._close(trial, Cause.FAILED, Action.RESTART, error)
            return
        self._close(trial, Cause.FAILED, Action.GIVE_UP, error)
        how = Exit.INVALID_HP if outcome.get("kind") == "invalid" else Exit.FAILED
        self._go_on_with(slot, self._journal.end(slot.number, work.trial, how))

    def _go_on_with(self, slot: Slot, work: Work | None) -> None:
        """Assign the next work to a slot. Its process gets a new turn if the trial is the same, and else must exit."""
        before, slot.work = slot.work, work
        if slot.trial and not (slot.process and work and before and work.trial == before.trial):
            is_done = self._journal.state().method.is_closed(slot.trial.id)
            cause, action = (Cause.FINISHED, Action.DONE) if is_done else (Cause.WAITING, Action.WAIT)
            self._close(slot.trial, cause, action)
        if slot.process is None:
            return
        assert slot.trial
        assert before
        if work and work.trial == before.trial:
            _give(slot.trial, self._next_turn(slot.trial, work))
        else:
            slot.trial.write_turn(None)
            slot.let_go_at = time.monotonic() + LEAVES_S

    def _let_go(self, slot: Slot) -> None:
        """Free the slot if its process has exited; end the process if it takes too long."""
        assert slot.process
        assert slot.let_go_at is not None
        if not slot.process.is_running():
            slot.process = slot.let_go_at = None
        elif time.monotonic() > slot.let_go_at:
            slot.process.end()

    def _next_turn(self, trial: TuneTrial, work: Work) -> Turn:
        """Return the trial's turn for this work: the recorded one if its end is the same, else a new one."""
        status = _status(trial)
        last = Turn(**status["turn"]) if "turn" in status else None
        if last and last.until == work.until:  # begun before, and not completed: by this driver or an earlier one
            return last
        hparams, source = self._hparams(work.trial)
        turn_number = last.number + 1 if last else 1
        load = self._copied(source, trial, turn_number) if source else None
        process = last.process if last else 0
        return Turn(number=turn_number, process=process, until=work.until, config=hparams, load=load, **self._turns)

    def _hparams(self, trial: int) -> tuple[dict[str, Any], int | None]:
        """Return the hyperparameters of the trial's next turn, and the trial whose checkpoint it loads, or None."""
        method = self._journal.state().method
        if isinstance(method, Population):
            return method.member(trial)
        self._journal.choose(trial)
        sample = self._journal.sample(trial)
        return sample.hparams, sample.source

    def _copy_source(self, number: int) -> None:
        """In a population, copy the checkpoint that the trial's next turn starts from."""
        # Not when the turn begins: by then the other trial may have a newer checkpoint, whose result the searcher did
        # not know when it chose that trial.
        trial = self._run.trial(number)
        if isinstance(self._journal.state().method, Population) and (source := self._hparams(number)[1]):
            self._copied(source, trial, _status(trial)["turn"]["number"] + 1)

    def _copied(self, source: int, trial: TuneTrial, turn: int) -> str | None:
        """Copy the newest checkpoint of `source` by hard links into the folder of `trial`; return its path, or None."""
        theirs, target = self._run.trial(source).checkpoints, trial.start(turn)
        for _ in range(COPIES):
            if target.exists():
                return str(target)
            if not (found := committed(theirs)):
                return None
            shutil.rmtree(target.parent, ignore_errors=True)
            with suppress(shutil.Error, OSError):  # deleted meanwhile: try the next one
                partial = target.with_name(f".{turn}")
                shutil.copytree(found[0].path, partial, copy_function=os.link)
                partial.rename(target)
        raise HpcDetError(f"trial {trial.id}: copying a checkpoint of trial {source} from {theirs} failed repeatedly")

    def _end_all(self) -> None:
        """End the processes of all trials, and wait for their end."""
        running = [slot.process for slot in self._slots if slot.process]
        for slot in self._slots:
            if slot.trial:
                slot.trial.write_turn(None)
                self._close(slot.trial, Cause.PAUSED, Action.PAUSE)
        while running := [process for process in running if process.is_running()]:
            for process in running:
                process.end()
            time.sleep(self._place.poll_s)
        state = self._journal.state()
        for worker in [worker for worker, job in state.present.items() if job == self._job]:
            if state.paused:
                self._journal.lose(worker, self._job)  # its trial is paused, too
            else:
                self._journal.leave(worker)

    def _close(
        self, trial: TuneTrial, cause: Cause, action: Action, failure: str | None = None, *, late: bool = False
    ) -> None:
        """Record the end of the trial's process in its journal, unless that was recorded before."""
        journal = Journal(trial.journal)
        if (attempt := journal.open_attempt()) is not None:
            newest = trial.newest()
            end = AttemptEnd(cause=cause, steps=newest[ITERATION] if newest else 0)
            why = AGAIN if action is Action.PAUSE else cause.value
            journal.ended(attempt, end, Decision(action, why), failure, late=late)


def _stop_of(trial: TuneTrial) -> StopRequest | None:
    """Return the request of a command to stop the trial, or None."""
    return read_stop(trial.stop, Journal(trial.journal).last_attempt()) if trial.stop.exists() else None


def _is_at_end(result: Mapping[str, Any], work: Work) -> bool:
    """Return whether the work ends with this result."""
    return bool(result[DONE] or (work.until is not None and result[ITERATION] >= work.until))


def _status(trial: TuneTrial) -> dict[str, Any]:
    """Return the driver's record of the trial."""
    return read_json(trial.trial) or {}


def _give(trial: TuneTrial, turn: Turn) -> None:
    """Record the turn, and give it to the trial's process."""
    # Recorded first: after a crash between the two, the next driver must not give another turn the same number.
    _note(trial, turn=asdict(turn), hparams=turn.config, trial_seed=0)
    trial.write_turn(turn)


def _note(trial: TuneTrial, **facts: Any) -> None:
    """Add facts to the driver's record of the trial."""
    write_json(trial.trial, {**_status(trial), **facts})
