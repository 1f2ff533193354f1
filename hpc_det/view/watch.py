"""The state of experiments: queried once for many, watched over time, or required by a command to be final."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpc_det.checkpoint.storage import source_of
from hpc_det.errors import HpcDetError, UsageError, say
from hpc_det.schedulers import scheduler as schedulers
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Scheduler, run_command
from hpc_det.schedulers.shared_answers import ASK_S, SharedAnswers
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.local_run import run_of_driver
from hpc_det.view.formatting import duration
from hpc_det.view.interrupted import find_successors, settle
from hpc_det.view.state import ExperimentState, ExperimentView

NO_NEWS = JobStatus(JobState.UNKNOWN)
"""The status of a job before the scheduler has reported it."""
POLL_S = 0.2
"""Seconds between two reads of the files."""
SUBMISSION_S = 60.0
"""Seconds after the start of a submission for which its jobs are still expected."""
LONGEST_PAUSE_S = 30.0
"""Longest time in seconds between two queries of the scheduler while nothing changes."""


def ask_every_s(scheduler: Scheduler) -> float:
    """Return the minimum seconds between two queries of the scheduler; the local machine answers without a query."""
    return ASK_S if scheduler.has_queue else 0.0


def states(views: Iterable[ExperimentView]) -> dict[int, ExperimentState]:
    """Return the states by number. Each scheduler is queried once, about all experiments whose files leave it open.

    Raises HpcDetError for experiments with damaged files.
    """
    found, damaged = readable_states(views)
    if damaged:
        raise HpcDetError([problem for error in damaged.values() for problem in error.problems])
    return found


def readable_states(
    views: Iterable[ExperimentView],
) -> tuple[dict[int, ExperimentState], dict[int, HpcDetError]]:
    """Return the states like `states`, and the errors of experiments with damaged files; both by number."""
    found: dict[int, ExperimentState] = {}
    damaged: dict[int, HpcDetError] = {}
    waiting: dict[str, list[tuple[ExperimentView, list[str]]]] = {}
    for view in views:
        with _kept(damaged, view):
            settle_submission(view)
            settled = view.settled()
            if settled or not view.jobs:
                found[view.id] = settled or view.state([])
            else:
                waiting.setdefault(view.jobs[0].scheduler, []).append((view, view.job_ids()))
    for name, asked in waiting.items():
        statuses = schedulers.scheduler(name).status([job for _, job_ids in asked for job in job_ids], run_command)
        if (reason := _no_news(statuses)) is not None:
            say(f"the scheduler did not report some jobs, so their states come from files: {reason}")
        for view, job_ids in asked:
            with _kept(damaged, view):
                found[view.id] = _with_successors(view, view.state([statuses[job] for job in job_ids]))
    return found, damaged


def readable_views(experiments: Iterable[ExperimentFolder]) -> tuple[list[ExperimentView], dict[Path, HpcDetError]]:
    """Return the views of experiments whose files can be read, and the errors of the others, by folder."""
    views: list[ExperimentView] = []
    damaged: dict[Path, HpcDetError] = {}
    for experiment in experiments:
        try:
            views.append(ExperimentView(experiment))
        except HpcDetError as error:
            damaged[experiment.path] = error
    return views, damaged


@contextmanager
def _kept(damaged: dict[int, HpcDetError], view: ExperimentView) -> Iterator[None]:
    """Collect an error of one experiment, so that others continue."""
    try:
        yield
    except HpcDetError as error:
        damaged[view.id] = error


def _with_successors(view: ExperimentView, found: ExperimentState) -> ExperimentState:
    """Return the state, corrected if a job was killed after it submitted a successor and before it recorded it."""
    if not found.is_final or view.settled() or not view.is_own or not view.jobs:
        return found
    try:
        if not find_successors(view.folder):
            return found
    except (CommandError, OSError) as error:  # OSError: for instance, the disk is full
        say(f"experiment {view.id}: searching the queue for its next job failed: {error}")
        return found
    statuses = schedulers.scheduler(view.jobs[0].scheduler).status(view.job_ids(), run_command)
    return view.state(statuses.values())


def settle_submission(view: ExperimentView) -> None:
    """Settle a submission whose process was killed. Until the scheduler answers, the experiment stays SUBMITTING."""
    if view.submitter is None:
        return
    try:
        if settle(view.folder):
            view.look()
    except (CommandError, OSError) as error:  # OSError: for instance, the disk is full
        say(f"experiment {view.id}: {view.submitter} was killed while it submitted, and its jobs are unknown: {error}")


def state(view: ExperimentView) -> ExperimentState:
    """Return the state of one experiment, as `states` does."""
    return states([view])[view.id]


class Watch:
    """One experiment over time. Requeued jobs that the scheduler holds are released."""

    def __init__(self, experiment: ExperimentFolder) -> None:
        self.view = ExperimentView(experiment)
        self._jobs = 0
        """Number of jobs at the last query; `activate` and `continue` submit more."""
        self._entries = 0
        """Number of entries of the search's journal at the last query."""
        self._pause_s = 0.0
        self._next_ask = 0.0
        self._next_settle = 0.0
        self._heard: dict[str, JobStatus] = {}
        """The scheduler's last answer, by job."""
        self._believed: list[JobStatus] = []
        """The same, with NO_NEWS for ends that are not confirmed yet."""

    def state(self) -> ExperimentState:
        """Return the current state, after a query of the scheduler if one is due.

        Raises HpcDetError if the experiment was deleted.
        """
        self.view.look()
        if not self.view.folder.config.exists():
            raise HpcDetError(f"experiment {self.view.id}: was deleted")
        self._settle_submission()
        if settled := self.view.settled():
            return settled
        is_due = time.monotonic() >= self._next_ask or self.view.entries != self._entries
        if self.view.jobs and (is_due or self._jobs != len(self.view.jobs)):
            self._jobs = len(self.view.jobs)
            self._ask(schedulers.scheduler(self.view.jobs[0].scheduler))
        found = _with_successors(self.view, self.view.state(self._believed))
        return ExperimentState.QUEUED if found.is_final and self._has_another_job() else found

    def _settle_submission(self) -> None:
        if self.view.submitter and time.monotonic() >= self._next_settle:
            self._next_settle = time.monotonic() + LONGEST_PAUSE_S / 10
            settle_submission(self.view)

    def _has_another_job(self) -> bool:
        """Return whether jobs were added since the last query, or are being submitted.

        In that case the end of the earlier jobs is not the end of the experiment.
        """
        last = self.view.jobs[-1].submitted if self.view.jobs else 0.0
        is_being_submitted = last < self.view.submitted and time.time() - self.view.submitted < SUBMISSION_S
        return not self.view.settled() and (self._jobs != len(self.view.jobs) or is_being_submitted)

    def wait(self, poll_s: float, timeout_s: float = math.inf) -> ExperimentState:
        """Wait until the state is final, and return it. Raises TimeoutError after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not (found := self.state()).is_final:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"experiment {self.view.id} is still {found.value} after {duration(timeout_s)}")
            time.sleep(min(poll_s, left))
        return found

    def _ask(self, scheduler: Scheduler) -> None:
        if (statuses := self._news(scheduler)) is None:
            return
        self._believed = [self._believable(job_id, status) for job_id, status in statuses.items()]
        former, self._heard = self._heard, statuses
        self._wait_longer(ask_every_s(scheduler), is_quiet=statuses == former)
        held = sorted(_held(statuses) - _held(former))
        if held and self.view.is_own:
            self._lift_holds(scheduler, held)
        if (reason := _no_news(statuses)) is not None and _no_news(former) is None:
            say(f"the scheduler does not report experiment {self.view.id}, so its state comes from files: {reason}")

    def _news(self, scheduler: Scheduler) -> dict[str, JobStatus] | None:
        """Return the scheduler's answer by job; None if the user's processes have queried it too recently."""
        answers = SharedAnswers(self.view.folder.root(), scheduler)
        return answers.news(self.view.job_ids(), run_command, max_age_s=ASK_S)

    def _wait_longer(self, shortest_s: float, *, is_quiet: bool) -> None:
        """Set the time of the next query: the pause doubles while neither answers nor the search's journal change."""
        has_changed = self.view.entries != self._entries or not is_quiet
        self._entries = self.view.entries
        self._pause_s = shortest_s if has_changed else min(max(2 * self._pause_s, shortest_s), LONGEST_PAUSE_S)
        self._next_ask = time.monotonic() + self._pause_s

    def _believable(self, job_id: str, status: JobStatus) -> JobStatus:
        """Return the status, or NO_NEWS for an end that the scheduler reports for the first time.

        While a job is being requeued, or as long as NFS shows old files, a job seems to have ended without a cause. So
        an end counts only if two answers in a row report it.
        """
        seen = self._heard.get(job_id)
        is_news = seen is None or seen.state is not JobState.ENDED
        return NO_NEWS if status.state is JobState.ENDED and is_news else status

    def _lift_holds(self, scheduler: Scheduler, job_ids: list[str]) -> None:
        held = f"experiment {self.view.id} is back in the queue, held by the scheduler"
        for job_id in job_ids:
            try:
                scheduler.release(job_id, run_command)
            except HpcDetError as error:
                say(f"{held}: releasing job {job_id} failed: {error}")
            else:
                say(f"{held}: released job {job_id}, it may start now")


def _held(statuses: dict[str, JobStatus]) -> set[str]:
    return {job_id for status in statuses.values() for job_id in status.held}


def _no_news(statuses: dict[str, JobStatus]) -> str | None:
    """Return why the scheduler reports no state of a job, or None if it reports all."""
    return next((status.reason for status in statuses.values() if status.state is JobState.UNKNOWN), None)


def insist_on_completion(view: ExperimentView, found: ExperimentState) -> None:
    """Raise HpcDetError with the reason unless the final state `found` is COMPLETED."""
    if found is not ExperimentState.COMPLETED:
        problem = f"experiment {view.id}: {found.value}: {view.why_not_completed(found)}"
        raise HpcDetError([problem, what_to_do(view)])


def what_to_do(view: ExperimentView) -> str:
    """Return what the user can do about an experiment that ended without being completed."""
    more = f"see more with `hpc-det experiment logs {view.folder.named()}`"
    if view.is_local:
        run = run_of_driver(view.folder)
        output = more if run else "its output is in the terminal where its script was started"
        is_lost = run and not run.exists()  # a temporary run
        return output if is_lost else f"{output}; start the script again to resume it"
    if view.search.finished or not view.is_own:
        return more
    return f"{more}, continue with `hpc-det experiment continue {view.id}`"


def insist_on_end(experiments: Sequence[ExperimentFolder]) -> None:
    """Raise UsageError that names all experiments that have not ended, and those with damaged files."""
    views, damaged = readable_views(experiments)
    found, unreadable = readable_states(views)
    damaged |= {view.folder.path: unreadable[view.id] for view in views if view.id in unreadable}
    problems = [
        f"{error}; its state is unknown: if `hpc-det job list` shows no job of it, remove {path} by hand"
        for path, error in damaged.items()
    ]
    problems += [
        f"experiment {number} is {state.value}; end it first with `hpc-det experiment kill {number}`"
        for number, state in found.items()
        if not state.is_final
    ]
    problems += [
        f"experiment {view.id}: {view.submitter} submits its jobs, or was killed while it did; try again in a moment"
        for view in views
        if view.submitter
    ]
    if problems:
        raise UsageError(problems)


def beginning_with(folders: Sequence[Path], root: Path) -> list[str]:
    """Return a sentence for each unfinished experiment below the state root whose trials start with weights from
    `folders`.

    Experiments with damaged files are left out.
    """
    named = [
        (experiment, source)
        for experiment in ExperimentStore(root).all()
        if (source := source_of(experiment)) and any(source.is_relative_to(folder) for folder in folders)
    ]
    running, _ = readable_states(readable_views(experiment for experiment, _ in named)[0])
    return [
        f"experiment {experiment.id} is {running[experiment.id].value}, and its trials begin with the weights in "
        f"{source}: trials that have not started would fail"
        for experiment, source in named
        if experiment.id in running and not running[experiment.id].is_final
    ]
