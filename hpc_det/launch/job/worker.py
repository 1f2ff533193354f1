"""A worker: takes work from the experiment's search and trains it, until no work is left.

    python3 -m hpc_det.launch.job.worker EXPERIMENT_FOLDER NUMBER -- COMMAND THAT STARTS ONE AGENT PER NODE

A unit of work is a stretch of one trial, up to the point at which the search decides again. Imports that only some
workers need, or all of them after the start of the ranks, are made there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from hpc_det.errors import HpcDetError, UsageError, count
from hpc_det.launch.job.agents import Agents
from hpc_det.launch.job.attempts import Attempts
from hpc_det.node import full_disk
from hpc_det.node.installation import Replaced, start_again
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState, run_command, scheduler
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, FixedSearch, Work
from hpc_det.store.attempt import Reason, first_failure, read_stop, request_stop
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal, Overtaken
from hpc_det.store.log_lines import printed_to, say_of_worker

DONE, GAVE_UP, OVERTAKEN, WANTS_REQUEUE = 0, 1, 3, 75
"""Exit codes of a worker (see `Worker.run`). 75 is EX_TEMPFAIL of sysexits.h: try again later."""
FULL_DISK_POLL_S = 5.0
"""Seconds between two tries of a write that found no space."""
LONGEST_SAVE_S, SAVE_POLL_S = 120.0, 0.2
"""Seconds that a trial waits for the other trial whose weights it starts with to save, and between two checks for that.

The other trial reports its result before it saves, so its checkpoint may not be complete yet.
"""


class Worker:
    """One worker of an experiment, for the duration of one job."""

    def __init__(self, experiment: ExperimentFolder, number: int, start_agents: list[str]) -> None:
        self._experiment = experiment
        self._number = number
        self._search = SearchJournal(experiment)
        plan = JobPlan.of(experiment)
        self._scheduler = scheduler(plan.scheduler)
        self._agents = Agents(start_agents, plan, has_queue=self._scheduler.has_queue)
        self._job_id = self._scheduler.job_id(os.environ)
        self._signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a job with several workers starts them blocked
        self._heard: list[signal.Signals] = []
        """Stop signals received."""
        self._code = DONE
        self._is_cancelled = False
        """True if the worker's trial was cancelled because the job is being ended; it then takes no more work."""

    def run(self) -> int:
        """Work until nothing is left, and return the exit code.

        DONE: nothing is left to do. GAVE_UP: the same, after a trial that was given up, or another job already runs as
        this worker. WANTS_REQUEUE: work is left. OVERTAKEN: another job now runs as this worker.

        Raises Replaced between two attempts; the process then has to start again.
        """
        former = self._search.state().present.get(self._number)
        if other := self._running(former) or self._search.claim(self._number, self._job_id, after=former):
            self._say(f"job {other} already runs as this worker; nothing is started")
            return GAVE_UP
        try:
            with full_disk.waited_for(self._waits_for_space):
                self._close_interrupted()
                return self._work_and_tell()
        except OSError as error:
            if not (full_disk.cause_in(error) and self._heard):
                raise
            self._say(f"the disk is full, so the worker exits without writing its journal: {error}")
            return WANTS_REQUEUE if self._scheduler.has_queue else GAVE_UP

    def _waits_for_space(self, error: OSError) -> bool:
        """Wait before a write to a full disk is retried, between attempts; return False after a stop signal."""
        if self._heard:
            return False
        self._say(f"retrying a write in {FULL_DISK_POLL_S:.0f} s: {full_disk.sentence(error)}")
        time.sleep(FULL_DISK_POLL_S)  # signals are kept in their pipe
        self._heard += [number for number in self._signals.received() if number in STOP_SIGNALS]
        return not self._heard

    def _work_and_tell(self) -> int:
        """Work, call the notification hooks, and record an unexpected end; return the exit code."""
        try:
            with self._hooks_told() as beginning_told:
                return self._work(beginning_told)
        except Overtaken as error:
            self._say(str(error))
            return OVERTAKEN
        except Replaced:
            self._say("the installed hpc_det was replaced; the job continues with the new version")
            raise
        except BaseException:
            end_descendants()
            with suppress(OSError):  # a full disk may be the reason
                self._close_interrupted()
            with suppress(OSError):
                self._search.lose(self._number, self._job_id)
            raise
        finally:
            self._agents.dismiss()

    def _hooks_told(self) -> AbstractContextManager[Callable[[], None]]:
        """Call the experiment's notification hooks, if it has any, at the beginning and the end of the block."""
        if not (read_json(self._experiment.effective) or {}).get("notify"):
            return nullcontext(lambda: None)
        from hpc_det.notify.change import hooks_told

        return hooks_told(self._experiment, self._say)

    def _close_interrupted(self) -> None:
        """Record the end of an attempt that this worker, in this job or a former one, could not record."""
        # The search may have assigned other work before the former gang had ended, so look at the last trial, too.
        state = self._search.state()
        numbers = {work.trial for work in (state.open.get(self._number),) if work} | {
            state.last_trial.get(self._number)
        }
        for trial in (self._experiment.trial(number) for number in numbers if number):
            began = Journal(trial.journal).open_job()
            if began and began[0] == self._number:
                with printed_to(trial.job_log):
                    Attempts(trial, self._number, self._agents, self._signals, []).close_interrupted()

    def _work(self, beginning_told: Callable[[], None]) -> int:
        """Train one unit of work after another; return the exit code.

        `beginning_told`: waits until the hooks for the start of the experiment have been called.
        """
        work = self._search.state().open.get(self._number) or self._left_by_others()
        while work is not None:
            action = self._train(work)
            if action is Action.REQUEUE:
                return WANTS_REQUEUE
            if action is Action.PAUSE:
                self._search.lose(self._number, self._job_id)
            work = self._after(work.trial, action) or self._left_by_others()
        self._collect_checkpoints()
        beginning_told()
        self._search.leave(self._number)
        self._say("nothing is left to do here")
        return self._code

    def _collect_checkpoints(self) -> None:
        """Delete the checkpoints that checkpoint_storage does not keep, if no worker has work any more."""
        search = self._search.state()
        # Before `leave`, so that the experiment does not look finished yet. Workers that still save do the same later.
        if not search.finished or search.open:
            return
        from hpc_det.checkpoint.storage import collect

        try:
            gone = collect(self._experiment)
        except (HpcDetError, OSError) as error:
            self._say(f"deleting the checkpoints that checkpoint_storage does not keep failed: {error}")
            return
        if gone:
            self._say(f"deleted {count(len(gone), 'checkpoint')} that checkpoint_storage does not keep")

    def _running(self, former: str | None) -> str | None:
        """Return the job `former` if it still runs as this worker, else None."""
        # A user may start the script while the job with this number still runs. Cached answers may be older than this
        # job, because a successor starts a second after its predecessor's end: so ask again before believing RUNNING.
        began = time.time()
        if former in (None, self._job_id) or self._states([former])[former] is not JobState.RUNNING:
            return None
        return former if self._states([former], since=began)[former] is JobState.RUNNING else None

    def _left_by_others(self) -> Work | None:
        """Return work of workers whose jobs have ended, or None."""
        search = self._search.state()
        others = {
            number: job for number, job in search.present.items() if number in search.open.keys() - {self._number}
        }
        # Query the scheduler only if there may be such work.
        if not others or search.rests or self._is_cancelled:
            return None
        states = self._states(sorted(set(others.values())))
        lost = {number: job for number, job in others.items() if states[job] is JobState.ENDED}
        for number, job in lost.items():
            self._say(f"worker {number} has ended with its job {job}; its work is done again")
            self._search.lose(number, job)
        return self._search.ask(self._number, self._job_id) if lost else None

    def _states(self, job_ids: list[str], since: float | None = None) -> dict[str, JobState]:
        """Return the states of jobs from the user's shared cache of scheduler answers: many workers cause one query."""
        answers = SharedAnswers(self._experiment.root(), self._scheduler)
        return {job: status.state for job, status in answers.status(job_ids, run_command, since=since).items()}

    def _train(self, work: Work) -> Action:
        """Run attempts at the trial of `work`, and return the last decision."""
        trial = self._experiment.trial(work.trial)
        self._say(f"trial {work.trial}" + (f" until {work.until}" if work.until is not None else ""))
        self._insist_on_being_present()
        refusal = _refusal(trial, self._search)
        search = self._search.state()
        # The command that cancelled or paused the search may not have seen this trial, so request its stop here.
        if search.cancelled or search.paused:
            reason: Reason = "kill" if search.cancelled else "pause"
            request_stop(trial.stop, attempt=None, reason=reason, source=search.cancelled or search.paused or "")
        with printed_to(trial.job_log):
            attempts = Attempts(trial, self._number, self._agents, self._signals, self._heard)
            return attempts.refuse(refusal) if refusal else attempts.run()

    def _insist_on_being_present(self) -> None:
        """Raise Overtaken if another job now runs as this worker."""
        search = self._search.state()
        holder = search.present.get(self._number, self._job_id)
        if holder != self._job_id and not search.finished:  # a finished search no longer records who starts
            raise Overtaken(f"job {holder} now runs as this worker and continues its work")

    def _after(self, number: int, action: Action) -> Work | None:
        """Report the end of a trial's work to the search, unless rank 0 has done so; return the next work, or None."""
        if action is Action.GIVE_UP:
            self._code = GAVE_UP
        work = self._search.state().open.get(self._number)
        # Rank 0 reports a unit of work that was completed; all other ends are reported here.
        if work is None or work.trial != number or action is Action.WAIT:
            return work
        trial = self._experiment.trial(number)
        how = _how(trial, action)
        if how is Exit.COMPLETED and not isinstance(self._search.state().method, FixedSearch):
            self._say(
                f"trial {number} ended without reporting searcher.metric, by which this search compares trials, and so "
                f"counts as failed; report it from hpc_det.pytorch, or use searcher single, grid or random"
            )
            how, self._code = Exit.FAILED, GAVE_UP
        if how is Exit.CANCELLED and self._is_killed_alone(trial):
            self._search.end(self._number, number, how)
            return self._search.ask(self._number, self._job_id)
        self._is_cancelled = how is Exit.CANCELLED
        if self._is_cancelled and not self._scheduler.has_queue:
            self._search.cancel("a signal to the job")  # without a queue the signal is meant for the experiment
        return self._search.end(self._number, number, how)

    def _is_killed_alone(self, trial: TrialFolder) -> bool:
        """Return whether `hpc-det trial kill` has ended this trial only, so that the worker continues with others."""
        stop = read_stop(trial.stop, Journal(trial.journal).last_attempt())
        return stop is not None and stop.reason == "kill" and self._search.state().cancelled is None

    def _say(self, text: str) -> None:
        say_of_worker(self._number, text)


def _how(trial: TrialFolder, action: Action) -> Exit:
    """Return how the trial ended, for the search."""
    journal = Journal(trial.journal)
    if action is Action.DONE:
        verdict = journal.verdict()
        return Exit.CANCELLED if verdict and verdict[0] is Cause.CANCELLED else Exit.COMPLETED
    failure = first_failure(trial, journal.last_attempt())
    return Exit.INVALID_HP if failure and failure.invalid_hp else Exit.FAILED


def _refusal(trial: TrialFolder, search: SearchJournal) -> str | None:
    """Return why the trial can never start, an error of the user; None if it can."""
    try:
        prepare_trial(trial, search)
    except UsageError as error:
        return str(error)
    return None


def prepare_trial(trial: TrialFolder, search: SearchJournal) -> None:
    """Write the trial's specification for the ranks, unless it exists. Raises UsageError if a value is missing."""
    trial.create()
    if trial.trial.exists():
        return
    search.choose(trial.id)
    sample = search.sample(trial.id)
    warm_start = _weights(trial, sample.source)
    spec = {
        "experiment_id": trial.experiment().id,
        "trial_id": trial.id,
        "trial_seed": sample.seed,
        "hparams": sample.hparams,
        "config": search.config(trial.id),
    }
    write_json(trial.trial, {**spec, "warm_start": str(warm_start)} if warm_start else spec, private=True)


def _weights(trial: TrialFolder, source: int | None) -> Path | None:
    """Return the checkpoint whose weights the trial starts with, or None.

    `source`: the trial of this search that it comes from; None: the checkpoint with which all trials start, if any.
    """
    if source is None:
        chosen = read_json(trial.experiment().warm_start)
        return Path(chosen["checkpoint"]) if chosen else None
    from hpc_det.checkpoint.committed import newest_good

    other = trial.experiment().trial(source)
    end = time.monotonic() + LONGEST_SAVE_S
    while Journal(other.journal).open_attempt() is not None and time.monotonic() < end:
        time.sleep(SAVE_POLL_S)  # signals are kept in their pipe
    found, _ = newest_good(other.checkpoints)
    if found is None:
        raise UsageError(
            f"searcher.class: trial {trial.id} starts with the weights of trial {source}, which has no checkpoint"
        )
    return found.path


def main(argv: list[str]) -> int:
    folder, number, separator, *start_agents = argv
    assert separator == "--"
    adopt_orphans()
    try:
        return Worker(ExperimentFolder(Path(folder)), int(number), start_agents).run()
    except HpcDetError as error:
        say_of_worker(int(number), str(error))
        return GAVE_UP
    except Replaced:
        start_again()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
