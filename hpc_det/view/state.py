"""The jobs, configuration and state of an experiment, from its files.

The state comes from the search's journal and, if that leaves it open, from the scheduler. The scheduler is queried
before the files are read: if the last job ends in between, the files show its end.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_det.config.merge import Tree, leaves
from hpc_det.config.secrets import masked
from hpc_det.errors import HpcDetError, UsageError, count
from hpc_det.node.json_files import Count, DamagedFile, Moment, NewerFormat, Shape, checked, made, read_map
from hpc_det.plan.job_plan import JobPlan
from hpc_det.schedulers.scheduler import JobState, JobStatus, array_of
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.search.sample import Sample
from hpc_det.search.state import Entry, SearchState
from hpc_det.store.experiment_config import WHOLE, About, read_about, read_effective
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.local_run import is_alive, is_local
from hpc_det.store.submitting import Submitter, submitter_of
from hpc_det.view.trial_history import cancellation, read_attempts, read_visible, why_not_completed
from hpc_det.view.trials import counted


class ExperimentState(str, enum.Enum):
    """The state of an experiment, as commands show it."""

    SUBMITTING = "SUBMITTING"
    """A process is submitting its jobs, or was killed while doing so."""
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    """The scheduler has stopped the processes of its job and will continue them."""
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    CANCELED = "CANCELED"

    @property
    def is_final(self) -> bool:
        return self not in _NOT_FINAL

    @property
    def has_job(self) -> bool:
        """True if a job has nodes now."""
        return self in (ExperimentState.RUNNING, ExperimentState.SUSPENDED)


class NewerExperiment(UsageError):
    """A newer hpc_det wrote a file of the experiment, in a format that this one does not know."""


_NOT_FINAL = {
    ExperimentState.SUBMITTING,
    ExperimentState.QUEUED,
    ExperimentState.RUNNING,
    ExperimentState.SUSPENDED,
    ExperimentState.PAUSED,
}


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """The result of one submission: a job, or an array of jobs."""

    job_id: str
    scheduler: Literal["slurm", "pbs", "local"]
    submitted: float
    """Seconds since the epoch."""
    first: int
    """Number of the first worker; the others have the numbers after it."""
    workers: int


class ExperimentView:
    """The content of an experiment's files, as of the last call of `look`."""

    def __init__(self, folder: ExperimentFolder) -> None:
        """Read the files. Raises HpcDetError if they are damaged."""
        self.folder = folder
        with _readable(folder):
            self.is_own = folder.is_own()
            self._journal = SearchJournal(folder)
            self.config: Tree = checked(self._journal.config(1), WHOLE, folder.effective)
        self.jobs: list[SubmittedJob] = []
        """Submitted jobs, oldest first."""
        self.submitter: Submitter | None = None
        """Process that is submitting its jobs, or was killed while doing so; None if no submission is open."""
        self.submitted = 0.0
        """Start of the last submission, in seconds since the epoch; `jobs` has its jobs only when it has succeeded."""
        self.waits_for: str | None = None
        """The scheduler's reason why a job waits, from the last call of `state`; None if no job waits."""
        self.reports: list[Entry] = []
        """Reports of trials to the search, and their ends, oldest first."""
        self.entries = 0
        """Number of entries of the search's journal that were read."""
        self._worked_s, self._worked_until = 0.0, 0.0
        """The time with a worker up to the last entry, and the time of that entry, in seconds; see `worked_s`."""
        self._at_work: set[int] = set()
        """The workers that have started and not ended."""
        self.search = self.look()

    @property
    def id(self) -> int:
        return self.folder.id

    @property
    def is_local(self) -> bool:
        """True for a run outside a job."""
        return is_local(self.folder)

    def look(self) -> SearchState:
        """Read what is new in the files, and return the state of the search. Raises HpcDetError if they are damaged."""
        with _readable(self.folder):
            for entry in self._journal.new():
                self.entries += 1
                self._count_work(entry)
                self.reports += [entry] if entry["event"] in ("reported", "ended") else []
                self.submitted = entry["time"] if entry["event"] == "submitted" else self.submitted
            self.submitter = submitter_of(self.folder)  # before the jobs, which are all recorded when it is None
            self.jobs += _jobs(self.folder, after=len(self.jobs))
            return self._journal.state()

    def _count_work(self, entry: Entry) -> None:
        moment = entry.get("time", self._worked_until)
        self._worked_s, self._worked_until = self.worked_s(moment), moment
        if entry["event"] == "asked":
            self._at_work.add(entry["worker"])
        elif entry["event"] in ("left", "lost"):
            self._at_work.discard(entry["worker"])

    def worked_s(self, now: float) -> float:
        """Return the seconds in which at least one worker was present, until `now` in seconds since the epoch.

        Includes the time that a requeued worker waits in the queue.
        """
        return self._worked_s + (max(now - self._worked_until, 0.0) if self._at_work else 0.0)

    def plan(self) -> JobPlan:
        """Return the plan of the jobs. Raises HpcDetError if the file is damaged."""
        with _readable(self.folder):
            return JobPlan.of(self.folder)

    def about(self) -> About:
        """Return the current name, description and labels. Raises HpcDetError if the file is damaged."""
        with _readable(self.folder):
            return read_about(self.folder, self.config)

    def sample(self, trial: int) -> Sample:
        """Return the sample of a trial. Raises HpcDetError if the file is damaged."""
        with _readable(self.folder):
            return self._journal.sample(trial)

    @property
    def has_many_trials(self) -> bool:
        """True if the search has created more than one trial, or expects to."""
        return max(self.search.method.trials_expected, len(self.search.trials)) > 1

    def job_ids(self) -> list[str]:
        """Return the ids of all jobs and arrays, each before its successors.

        Includes running jobs that a user submitted by hand. Of a run outside a job, only the process that runs it now:
        a former one, such as a notebook's, may still exist and do something else.
        """
        if self.is_local:
            return [*self.search.present.values()]
        ids: list[str] = []
        for number, job in enumerate(self.jobs, 1):
            ids.append(job.job_id)
            for path in self.folder.all_next_jobs(number):
                ids += _next_jobs(path)
        by_hand = (job for job in self.search.present.values() if array_of(job) not in ids)
        return list(dict.fromkeys([*ids, *by_hand]))

    def settled(self) -> ExperimentState | None:
        """Return the final state, or PAUSED; None if the scheduler must be queried."""
        if self.search.present or not self.search.rests:
            return None
        return self._at_rest()

    def state(self, statuses: Iterable[JobStatus]) -> ExperimentState:
        """Return the state from the files or, if they leave it open, from the `statuses` of its jobs.

        A site may hide the jobs of other users, which then seem to have ended; for those users only files show an end.
        """
        self.look()
        if settled := self.settled():
            return settled
        known = [status for status in statuses if self.is_own or status.state is not JobState.ENDED]
        if self.is_local and any(status.state is JobState.UNKNOWN for status in known):  # a process of another host
            known = [_by_heartbeat(self.folder, job_id) for job_id in self.job_ids()]
        found = {status.state for status in known}
        queued = (status.reason for status in known if status.state in (JobState.QUEUED, JobState.HELD))
        self.waits_for = next(filter(None, queued), None)
        if JobState.RUNNING in found:
            stopped = all(status.is_suspended for status in known if status.state is JobState.RUNNING)
            return ExperimentState.SUSPENDED if stopped else ExperimentState.RUNNING
        if found & {JobState.QUEUED, JobState.HELD}:
            return ExperimentState.QUEUED
        if self.submitter and JobState.UNKNOWN not in found:
            return ExperimentState.SUBMITTING
        if JobState.UNKNOWN in found or not found:
            return ExperimentState.RUNNING if self._seems_to_run() else ExperimentState.QUEUED
        return self._after_all_jobs()

    def _seems_to_run(self) -> bool:
        """Return whether files suggest a running job; used if the scheduler does not answer.

        A worker that was preempted waits in the queue, although the search's journal still lists it as present.
        """
        search = self.search
        if search.finished:
            return bool(search.present)
        last = (read_attempts(self.folder.trial(work.trial))[-1:] for work in search.open.values())
        return any(not attempts or not attempts[0].is_requeued for attempts in last)

    def _after_all_jobs(self) -> ExperimentState:
        if self.search.rests:  # workers that were killed before they could record their exit
            return self._at_rest()
        return ExperimentState.CANCELED if self._cancellation() else ExperimentState.ERROR

    def _at_rest(self) -> ExperimentState:
        """Return the state of an experiment without work: the final state, or PAUSED.

        A paused experiment has ended if its trials were finished by then, or if it was cancelled later.
        """
        return _final(self.search) if self.search.finished else ExperimentState.PAUSED

    def _cancellation(self) -> str | None:
        """Return who requested the end of an unfinished trial, or None."""
        requests = (cancellation(self.folder.trial(number)) for number in _not_completed(self.search, Exit.CANCELLED))
        return next((request.source for request in requests if request), None)

    def why_not_completed(self, found: ExperimentState) -> str:
        """Return in a sentence why the experiment ended in the state `found`, with its first failure if it had one."""
        search = self.search
        if found is ExperimentState.CANCELED:
            source = search.cancelled or self._cancellation()
            return f"by {source}" if source else "its job was deleted (qdel, scancel)"
        if search.given_up:
            return search.given_up
        blamed = _not_completed(search)
        if not self.has_many_trials:
            return why_not_completed(self.folder.trial())
        if not blamed:
            return "the jobs exited without reporting a cause, and some trials were never started"
        why = why_not_completed(self.folder.trial(blamed[0]))
        return f"{self.not_done()}; trial {blamed[0]}: {why}"

    def not_done(self) -> str:
        """Return how many trials of an unsuccessful search failed or were not done."""
        counts = counted(self.search, is_running=False)
        if self.search.finished:
            return f"{counts.failed + counts.invalid} of {count(counts.created, 'trial')} failed"
        expected = counts.expected + self.search.replaced
        left = expected - counts.ended - counts.invalid
        return f"{left} of {count(expected, 'trial')} {'was' if left == 1 else 'were'} not done"


def _by_heartbeat(folder: ExperimentFolder, job_id: str) -> JobStatus:
    return JobStatus(JobState.RUNNING if is_alive(folder, job_id) else JobState.ENDED)


_JOB: Shape = {"submitted": Moment, "first": Count, "workers": Count}


def _jobs(folder: ExperimentFolder, *, after: int) -> list[SubmittedJob]:
    """Return the jobs submitted after the first `after`, oldest first."""
    records: list[SubmittedJob] = []
    while (data := read_visible(path := folder.job(after + len(records) + 1))) is not None:
        records.append(made(SubmittedJob, checked(data, _JOB, path), path))
    return records


def _next_jobs(path: Path) -> list[str]:
    """Return the ids of the successors of a job, from their file. Raises DamagedFile."""
    data = read_visible(path)
    jobs: list[str] = [] if data is None else checked(data, {"jobs": list[str]}, path)["jobs"]
    return jobs


def _final(search: SearchState) -> ExperimentState:
    """Return the final state: completed if at least one trial is (Determined's rule: master/internal/trial.go)."""
    if search.cancelled:
        return ExperimentState.CANCELED
    if search.given_up:
        return ExperimentState.ERROR
    # in a finished search, a trial without a recorded end has completed all that was wanted of it
    ends = {trial.ended or Exit.COMPLETED for trial in search.trials.values()}
    if Exit.COMPLETED in ends:
        return ExperimentState.COMPLETED
    return ExperimentState.CANCELED if Exit.CANCELLED in ends else ExperimentState.ERROR


def _not_completed(search: SearchState, *more: Exit) -> list[int]:
    """Return the trials that failed or ended in one of the given ways, or else those that a worker still had."""
    ways = (Exit.FAILED, Exit.INVALID_HP, *more)
    failed = [number for number, trial in search.trials.items() if trial.ended in ways]
    return failed or sorted(work.trial for work in search.open.values())


@contextmanager
def _readable(folder: ExperimentFolder) -> Iterator[None]:
    """Raise errors of reading files in this block as HpcDetError, with the number of the experiment."""
    try:
        yield
    except NewerFormat as error:
        raise NewerExperiment(f"experiment {folder.id}: {error}") from None
    except DamagedFile as error:
        raise HpcDetError(f"experiment {folder.id}: {error}") from None
    except OSError as error:
        raise HpcDetError(f"experiment {folder.id}: {error.filename}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise HpcDetError(
            f"experiment {folder.id}: files in {folder.path} are damaged ({type(error).__name__}: {error})"
        ) from None


# --- configuration


def effective_config(experiment: ExperimentFolder) -> Tree:
    """Return the effective configuration. Raises HpcDetError if the file is missing or damaged."""
    try:
        config = read_effective(experiment)
    except DamagedFile as error:
        raise HpcDetError(f"experiment {experiment.id}: {error}") from None
    if config is None:
        raise HpcDetError(f"experiment {experiment.id}: {experiment.effective} is missing")
    return config


def shown_config(experiment: ExperimentFolder) -> tuple[Tree, dict[str, str]]:
    """Return the effective configuration for display, and the layer that set each leaf, by its path.

    Secrets are masked; name, description and labels are the current ones. Raises HpcDetError if the file is damaged.
    """
    submitted = masked(effective_config(experiment))
    about = read_about(experiment, submitted).as_json()
    now = {key: about.get(key, value) for key, value in submitted.items()}
    origins, former = read_map(experiment.origin) or {}, dict(leaves(submitted))
    return now, {
        path: origins.get(path, "default") if former.get(path) == value else "config" for path, value in leaves(now)
    }
