"""The state of a search after the entries of its journal: the same in every process that reads them.

Entries record facts. Each process derives the decisions of the search method from them, here. So a search needs no
server, and a decision can neither be lost nor be made twice.

{"event": "submitted", "first": 0, "count": 64, "stay": false, "rules": 1}   jobs for workers 0 to 63 are queued
{"event": "asked", "worker": 3, "job": "4711_3", "after": null}  a worker has started and requests work; ignored if
                                                                              another job has started as this worker
{"event": "reported", "worker": 3, "trial": 7, "until": 100, "value": 0.31}   its work is done; it requests more
{"event": "ended", "worker": 3, "trial": 7, "how": "failed"}     its trial has ended for good; it requests other work,
                                                                              unless the trial was cancelled
  "value" in it: the metric at the last validation of a trial that ended its training itself
  "batches" in this entry or in "reported": the length at that value, if it is not the one that the search requested
{"event": "lost", "worker": 5, "job": "4711_5"}                  this job has ended; its work must be done again
{"event": "sampled", "trial": 8, "sample": {...}}                a trial's sample, if the user's class or Optuna chose
{"event": "left", "worker": 3}                                   a worker has ended and has written all its files
{"event": "moved", "worker": 3, "job": "4713"}                   another job continues the work of this worker
{"event": "paused", "source": "ada"}                             no work is assigned until the search is activated
{"event": "activated"}                                           work is assigned again after a pause
{"event": "cancelled", "source": "ada"}                          no work is assigned any more
{"event": "continued", "trials": [7]}                            work is assigned again, also for these failed trials
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpc_det.errors import HpcDetError, count, shown
from hpc_det.node.json_files import Count, DamagedFile, Shape, problem_of
from hpc_det.search.custom import CustomSearch
from hpc_det.search.method import Exit, FixedSearch, SearchMethod, Work, better

_SHAPES: dict[str, Shape] = {
    "submitted": {"first": Count, "count": Count, "stay": bool},
    "asked": {"worker": Count, "job": str},
    "reported": {"worker": Count, "trial": Count, "value": float | None},
    "ended": {"worker": Count, "trial": Count, "how": Literal[tuple(how.value for how in Exit)]},
    "lost": {"worker": Count, "job": str},
    "sampled": {"trial": Count, "sample": dict},
    "left": {"worker": Count},
    "moved": {"worker": Count, "job": str},
    "paused": {"source": str},
    "activated": {},
    "cancelled": {"source": str},
    "continued": {"trials": list[Count]},
}
RULES = 1
"""The version of the rules by which searches decide. Every change that leads to other decisions from the same entries
increases it.
"""
Entry = dict[str, Any]
FEWEST_INVALID = 10
"""Minimum number of trials with invalid hyperparameters before a search gives up, however few trials it has."""


def check(entry: Entry, file: Callable[[], Path]) -> None:
    """Raise DamagedFile for an entry that no worker can have written, and HpcDetError for a search with other rules.

    `file` returns the file that contains the entry. Such an entry is not ignored, because the state would be wrong.
    """
    event = str(entry.get("event"))
    if event not in _SHAPES:
        raise DamagedFile(f"{file()}: damaged: unknown event in the entry {shown(entry)}")
    if event == "submitted":
        _check_rules(entry.get("rules", RULES))
    if problem := problem_of(_SHAPES[event], entry):
        raise DamagedFile(f"{file()}: damaged: {problem} in the entry {shown(entry)}")


@dataclass(slots=True)
class TrialState:
    """The state of one trial, from the entries of the journal."""

    worker: int | None = None
    """The worker that trains the trial now; None if none does."""
    length: int | None = None
    """The length at the trial's last report, in the unit of searcher.max_length.

    None before the first report, for work without a length, and for a trial that ended at another one.
    """
    value: float | None = None
    """The searcher's metric at the trial's last report; None before the first report."""
    ended: Exit | None = None
    """The reason why the trial has ended for good; None while it may continue."""


@dataclass
class SearchState:
    """The state of a search, from the entries of the journal."""

    method: SearchMethod
    trials: dict[int, TrialState] = field(default_factory=dict)
    """The state of each trial, by its number."""
    open: dict[int, Work] = field(default_factory=dict)
    """The work that each worker does now, by worker."""
    samples: dict[int, Entry] = field(default_factory=dict)
    """The recorded samples, by trial; only if the user's class or Optuna chooses them."""
    present: dict[int, str] = field(default_factory=dict)
    """The jobs of the workers that have started and not ended, by worker."""
    last_trial: dict[int, int] = field(default_factory=dict)
    """The previous trial of each worker, whose gang may still be saving."""
    cancelled: str | None = None
    """The source of the cancellation; None if the search is not cancelled."""

    paused: str | None = None
    """The source of the pause; None if the search is not paused."""

    submissions: int = 0
    """Number of times that jobs were submitted: first, after a pause, or to continue the search."""
    workers: int = 0
    """Number of workers in all submissions; workers are numbered from 0."""

    waiting: set[int] = field(default_factory=set)
    """Workers of the last submission that have not started."""

    def __post_init__(self) -> None:
        self._expected: set[int] = set()
        """Workers in `waiting` whose jobs start when a worker exits and releases its slots."""
        self._relied_on = 0
        """Number of workers in `_expected` for which work was left, because a worker has exited in their favour."""
        self._invalid = 0
        """Number of trials with invalid hyperparameters."""

    def apply(self, entry: Entry) -> None:
        """Apply the next entry of the journal, which `check` must have accepted."""
        match entry:
            # First, because nearly all entries of a long journal are reports.
            case {"event": "reported", "value": value} if self._is_due(entry):
                self._report(entry["worker"], math.nan if value is None else value)
                self._record(entry)
            case {"event": "submitted", "first": first, "count": count, "stay": stay}:
                self.submissions += 1
                self.workers = first + count
                self.waiting = set(range(first, first + count))
                # stay: the workers of a shared allocation start together, so none waits for another to exit.
                self._expected = set() if stay else set(range(first, first + count))
                self._relied_on = 0
            case {"event": "asked", "worker": worker, "job": job} if self._may_begin(entry):
                self._no_longer_expect(worker)
                if not self.finished:  # a worker that starts later exits at once and writes nothing
                    self.present[worker] = job
                if worker not in self.open:
                    self._give(worker, self._next_work())
            case {"event": "ended", "how": how} if self._is_due(entry):
                self._end(entry["worker"], Exit(how))
                if "value" in entry:
                    self._record(entry)
            case {"event": "lost", "worker": worker, "job": job} if self.present.get(worker, job) == job:
                self._no_longer_expect(worker)
                self.present.pop(worker, None)
                if work := self.open.pop(worker, None):
                    self.trials[work.trial].worker = None
                    self.method.give_back(work.trial)
            case {"event": "sampled", "trial": trial, "sample": sample}:
                # The first choice counts: another process may have recorded one before.
                self.samples.setdefault(trial, sample)
            case {"event": "left", "worker": worker}:
                self.present.pop(worker, None)
            case {"event": "moved", "worker": worker, "job": job} if worker in self.open:
                self.present[worker] = job
            case {"event": "paused", "source": source} if not self.finished:
                self.paused = source
            case {"event": "activated"}:
                self.paused = None
            case {"event": "cancelled", "source": source}:
                self.cancelled = source if self.cancelled is None and not self.finished else self.cancelled
            case {"event": "continued", "trials": trials}:
                self.cancelled = self.paused = None
                for trial in trials:
                    self._reopen(trial)

    @property
    def finished(self) -> bool:
        """Whether no work is left. Workers that are `present` may still write files."""
        if self.cancelled is not None:
            return True
        return not self.open and (self.method.finished or (self.given_up is not None and self._next_work() is None))

    @property
    def rests(self) -> bool:
        """Whether no worker gets work: the search is finished or paused."""
        return self.finished or self.paused is not None

    @property
    def given_up(self) -> str | None:
        """The reason why no more trials are created although the method requests some; None if there is none.

        Trials that exist already continue.
        """
        if isinstance(self.method, CustomSearch) and self.method.problem:
            return self.method.problem
        if self._invalid < FEWEST_INVALID or self._invalid < self.method.trials_expected:
            return None
        return (
            f"{self._invalid} of {count(len(self.trials), 'trial')} reported invalid hyperparameters (InvalidHP), so "
            "they are not replaced any more; narrow the ranges in hyperparameters to valid values"
        )

    def stopped_early(self) -> list[int]:
        """Return the numbers of the trials that failed or were cancelled and can be continued."""
        ended = (number for number, trial in self.trials.items() if trial.ended in (Exit.FAILED, Exit.CANCELLED))
        return [number for number in ended if self._may_go_on(number)]

    @property
    def replaced(self) -> int:
        """Number of trials with invalid hyperparameters that are replaced by others."""
        stay = isinstance(self.method, FixedSearch) and not self.method.replaces_invalid
        return 0 if stay else self._invalid

    def _may_go_on(self, trial: int) -> bool:
        """Return whether a trial that ended can be continued."""
        # A search that compares trials has made its decisions without a trial that it has closed.
        return isinstance(self.method, FixedSearch) or not self.method.is_closed(trial)

    def _may_begin(self, entry: Entry) -> bool:
        """Return whether the job in an "asked" entry may start as its worker.

        Of two jobs that start as the same worker, only the first may. The entry names the job that the worker had
        before (`after`); an entry without that is always accepted.
        """
        present = self.present.get(entry["worker"])
        return present in (entry["job"], entry.get("after", present))

    def _is_due(self, entry: Entry) -> bool:
        """Return whether the worker still has the work of this entry.

        It has not if it was considered lost meanwhile, and the work was assigned to another worker.
        """
        work = self.open.get(entry["worker"])
        return work is not None and work.trial == entry["trial"] and entry.get("until", work.until) == work.until

    def _reopen(self, number: int) -> None:
        """Let a trial that failed or was cancelled continue, if the method allows it."""
        # A search with a greater max_length is replayed from the start, and may not have created the trial yet.
        trial = self.trials.get(number)
        if trial is None or not self._may_go_on(number):
            return
        trial.ended = None
        if isinstance(self.method, FixedSearch) and self.method.is_closed(number):
            self.method.reopen(number)

    def _report(self, worker: int, value: float) -> None:
        work = self.open.pop(worker)
        self._done(worker, work)
        self.method.report(work.trial, value)
        self._give_after(worker, work.trial)

    def _record(self, entry: Entry) -> None:
        """Record the trial's value, which an entry contains."""
        trial, value = self.trials[entry["trial"]], entry["value"]
        trial.value = math.nan if value is None else value
        trial.length = None if "batches" in entry else entry.get("until")

    def _end(self, worker: int, how: Exit) -> None:
        work = self.open.pop(worker)
        self._done(worker, work).ended = how
        self._invalid += how is Exit.INVALID_HP
        if how is Exit.CANCELLED and self.cancelled:  # so that its work is available if the search is continued
            self.method.give_back(work.trial)
        else:
            self.method.end(work.trial, how)
        if how is not Exit.CANCELLED:  # the job of a cancelled trial is ending, too
            self._give_after(worker, work.trial)

    def _done(self, worker: int, work: Work) -> TrialState:
        self.last_trial[worker] = work.trial
        trial = self.trials[work.trial]
        trial.worker = None
        return trial

    def _give_after(self, worker: int, trial: int) -> None:
        """Assign work to a worker that has just finished some, unless a queued worker is to take it.

        The worker always continues its own trial. Other work goes to a queued worker, as long as there is one for each
        worker that exits.
        """
        work = self._next_work()
        # The worker exits and releases its slots: a queued worker, which starts then, takes this work.
        if work and work.trial != trial and self._relied_on < len(self._expected):
            self._relied_on += 1
        else:
            self._give(worker, work)

    def _next_work(self) -> Work | None:
        """Return the method's next work, or None; a search that was given up creates no trials."""
        work = self.method.next_work()
        is_new = work is not None and work.trial not in self.trials
        return None if is_new and self.given_up else work

    def _no_longer_expect(self, worker: int) -> None:
        """Record that a queued worker has started, or is lost."""
        self.waiting.discard(worker)
        if worker in self._expected:
            self._expected.remove(worker)
            self._relied_on = max(self._relied_on - 1, 0)

    def _give(self, worker: int, work: Work | None) -> None:
        """Assign the work to the worker, unless the search is cancelled or paused."""
        if work is None or self.cancelled or self.paused:
            return
        self.method.start(work)
        self.open[worker] = work
        if (trial := self.trials.get(work.trial)) is None:
            trial = self.trials[work.trial] = TrialState()
        trial.worker = worker


def _check_rules(rules: int) -> None:
    if rules != RULES:
        raise HpcDetError(
            f"this search was submitted with version {rules} of the search rules, but this hpc_det has version {RULES} "
            f"and would decide differently; use the hpc_det that submitted it, or start it again with "
            f"`hpc-det experiment fork`"
        )


class Length(NamedTuple):
    """A length of training."""

    amount: int
    unit: str
    """batches, records or epochs."""


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The trial with the best of the values that trials reported to the search, and that report."""

    trial: int
    metric: str
    value: float
    length: Length | None
    """The length at that report; None for work without a length."""


NO_METRIC = "(none)"
"""The metric in the searcher section of a search that compares no trials, because its schema requires a name."""


def best_trial(entries: Iterable[Entry], searcher: Mapping[str, Any]) -> BestTrial | None:
    """Return the best trial; None if no trial has reported a finite value, or for a search without a metric.

    `entries`: all entries of the journal, or only its reports.
    """
    best: BestTrial | None = None
    for entry in entries if searcher["metric"] != NO_METRIC else ():
        value = entry.get("value")
        if value is not None and better(value, best.value if best else None, searcher["smaller_is_better"]):
            length = length_of(entry, searcher)
            best = BestTrial(trial=entry["trial"], metric=searcher["metric"], value=value, length=length)
    return best


def length_of(entry: Entry, searcher: Mapping[str, Any]) -> Length | None:
    """Return the length at the value that an entry contains; None for work without a length."""
    if "batches" in entry:
        return Length(entry["batches"], "batches")
    unit = length_unit(searcher)
    return Length(entry["until"], unit) if unit and entry["until"] is not None else None


def length_unit(searcher: Mapping[str, Any]) -> str | None:
    """Return batches, records or epochs; None if the search has no max_length."""
    return next(iter(searcher.get("max_length") or []), None)
