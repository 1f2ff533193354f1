"""The state of a search: what its journal's entries make of it, the same in every process that reads them.

Entries are facts; what follows from them is decided here, by the search method. So nobody has to be asked, nothing has
to stay alive, and a decision cannot be lost or taken twice.

{"event": "submitted", "first": 0, "count": 64, "stay": false, "rules": 1}   jobs for workers 0 to 63 are in the queue
{"event": "asked", "worker": 3, "job": "4711_3", "after": null}  a worker has begun, and wants work; void where the
                                                                              worker is not that job any more
{"event": "reported", "worker": 3, "trial": 7, "until": 100, "value": 0.31}   its work is done; it wants more
{"event": "ended", "worker": 3, "trial": 7, "how": "failed"}     its trial will never go on; it wants other work,
                                                                              unless both were cancelled
{"event": "lost", "worker": 5, "job": "4711_5"}                  this job is gone, its work is to be done again
{"event": "sampled", "trial": 8, "sample": {...}}                a trial's hyperparameters, where others choose them
{"event": "left", "worker": 3}                                   a worker has ended, and wrote all that it had to
{"event": "moved", "worker": 3, "job": "4713"}                   another job goes on with what the worker has
{"event": "paused", "source": "ada"}                             no work until somebody wants that again
{"event": "activated"}                                           somebody does
{"event": "cancelled", "source": "ada"}                          no work any more
{"event": "continued", "trials": [7]}                            work again, and trials that failed get another chance
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpc_det.errors import HpcDetError, shown
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
"""Grows with every change by which a search would decide otherwise on the same facts."""
Entry = dict[str, Any]
FEWEST_INVALID = 10
"""Trials with invalid hyperparameters before a search gives up, however few trials it has."""


def check(entry: Entry, file: Callable[[], Path]) -> None:
    """Raises DamagedFile for an entry that no worker has written: left out, it would show a wrong state. `file`: that
    the entry is in.
    """
    event = str(entry.get("event"))
    if event not in _SHAPES:
        raise DamagedFile(f"{file()}: damaged: no such event in the entry {shown(entry)}")
    if event == "submitted":
        _check_rules(entry.get("rules", RULES))
    if problem := problem_of(_SHAPES[event], entry):
        raise DamagedFile(f"{file()}: damaged: {problem} in the entry {shown(entry)}")


@dataclass
class TrialState:
    """What the search knows of a trial."""

    worker: int | None = None
    """Who trains it now."""
    length: int | None = None
    """At its last report."""
    value: float | None = None
    """Of the searcher's metric, then."""
    ended: Exit | None = None


@dataclass
class SearchState:
    method: SearchMethod
    trials: dict[int, TrialState] = field(default_factory=dict)
    open: dict[int, Work] = field(default_factory=dict)
    """Who does what now."""
    samples: dict[int, Entry] = field(default_factory=dict)
    """Hyperparameters that others than the sampler of this package chose."""
    present: dict[int, str] = field(default_factory=dict)
    """Workers that have begun and not left, and their jobs."""
    last_trial: dict[int, int] = field(default_factory=dict)
    """Of each worker: what it worked on before. Its gang may still be saving."""
    cancelled: str | None = None
    """By whom."""

    paused: str | None = None
    """By whom."""

    submissions: int = 0
    """How often jobs were queued: at first, after a pause, to be continued."""
    workers: int = 0
    """How many were ever submitted; their numbers begin with 0."""

    waiting: set[int] = field(default_factory=set)
    """Those that were submitted last and have not begun."""

    def __post_init__(self) -> None:
        self._expected: set[int] = set()
        """Those of the `waiting` ones that may take the place of one that leaves."""
        self._relied_on = 0
        """How many of them will take the place of one that has left."""
        self._invalid = 0
        """How many trials had invalid hyperparameters."""

    def apply(self, entry: Entry) -> None:
        """Take in the next entry of the journal, which `check` has passed."""
        match entry:
            case {"event": "submitted", "first": first, "count": count, "stay": stay}:
                self.submissions += 1
                self.workers = first + count
                self.waiting = set(range(first, first + count))
                self._expected = set() if stay else set(range(first, first + count))
                self._relied_on = 0
            case {"event": "asked", "worker": worker, "job": job} if self._may_begin(entry):
                self._no_longer_expect(worker)
                if not self.finished:  # who begins later leaves at once, and writes nothing
                    self.present[worker] = job
                if worker not in self.open:
                    self._give(worker, self._next_work())
            case {"event": "reported", "value": value} if self._is_due(entry):
                self._report(entry["worker"], math.nan if value is None else value)
            case {"event": "ended", "how": how} if self._is_due(entry):
                self._end(entry["worker"], Exit(how))
            case {"event": "lost", "worker": worker, "job": job} if self.present.get(worker, job) == job:
                self._no_longer_expect(worker)
                self.present.pop(worker, None)
                if work := self.open.pop(worker, None):
                    self.trials[work.trial].worker = None
                    self.method.give_back(work.trial)
            case {"event": "sampled", "trial": trial, "sample": sample}:
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
        """Nothing is left to do. Workers that are `present` may still write."""
        if self.cancelled is not None:
            return True
        return not self.open and (self.method.finished or (self.given_up is not None and self._next_work() is None))

    @property
    def rests(self) -> bool:
        """Nobody gets work: all is done, or somebody wants a pause."""
        return self.finished or self.paused is not None

    @property
    def given_up(self) -> str | None:
        """Why no trials are created any more although the method wants some; those that are under way go on."""
        if isinstance(self.method, CustomSearch) and self.method.problem:
            return self.method.problem
        if self._invalid < max(FEWEST_INVALID, self.method.trials_expected):
            return None
        return (
            f"{self._invalid} of {len(self.trials)} trials said that their hyperparameters are invalid (InvalidHP), so "
            f"no others take their place; narrow the ranges in hyperparameters to what can work"
        )

    def stopped_early(self) -> list[int]:
        """Trials that failed or were cancelled, and may go on after all."""
        ended = (number for number, trial in self.trials.items() if trial.ended in (Exit.FAILED, Exit.CANCELLED))
        return [number for number in ended if self._may_go_on(number)]

    @property
    def replaced(self) -> int:
        """How many trials with invalid hyperparameters others take the place of."""
        stay = isinstance(self.method, FixedSearch) and not self.method.replaces_invalid
        return 0 if stay else self._invalid

    def _may_go_on(self, trial: int) -> bool:
        """A search that compares has taken its decisions without a trial that it has closed."""
        return isinstance(self.method, FixedSearch) or not self.method.is_closed(trial)

    def _may_begin(self, entry: Entry) -> bool:
        """Of two jobs that begin as one worker at the same moment, the first."""
        present = self.present.get(entry["worker"])
        return present in (entry["job"], entry.get("after", present))

    def _is_due(self, entry: Entry) -> bool:
        """Whether the worker has this work still: it may have been believed lost, and others do it now."""
        work = self.open.get(entry["worker"])
        return work is not None and work.trial == entry["trial"] and entry.get("until", work.until) == work.until

    def _reopen(self, number: int) -> None:
        trial = self.trials.get(number)  # a search with a greater max_length begins anew, and may not have it yet
        if trial is None or not self._may_go_on(number):
            return
        trial.ended = None
        if isinstance(self.method, FixedSearch) and self.method.is_closed(number):
            self.method.reopen(number)

    def _report(self, worker: int, value: float) -> None:
        work = self.open.pop(worker)
        trial = self._done(worker, work)
        trial.length, trial.value = work.until, value
        self.method.report(work.trial, value)
        self._give_after(worker, work.trial)

    def _end(self, worker: int, how: Exit) -> None:
        work = self.open.pop(worker)
        self._done(worker, work).ended = how
        self._invalid += how is Exit.INVALID_HP
        if how is Exit.CANCELLED and self.cancelled:  # its work is there again where the search goes on
            self.method.give_back(work.trial)
        else:
            self.method.end(work.trial, how)
        if how is not Exit.CANCELLED:  # its job is being ended, too
            self._give_after(worker, work.trial)

    def _done(self, worker: int, work: Work) -> TrialState:
        self.last_trial[worker] = work.trial
        trial = self.trials[work.trial]
        trial.worker = None
        return trial

    def _give_after(self, worker: int, trial: int) -> None:
        """Its own trial goes on with the same worker. Other work is for one that waits in the queue, while there is one
        for each that leaves.
        """
        work = self._next_work()
        if work and work.trial != trial and self._relied_on < len(self._expected):
            self._relied_on += 1
        else:
            self._give(worker, work)

    def _next_work(self) -> Work | None:
        work = self.method.next_work()
        is_new = work is not None and work.trial not in self.trials
        return None if is_new and self.given_up else work

    def _no_longer_expect(self, worker: int) -> None:
        self.waiting.discard(worker)
        if worker in self._expected:
            self._expected.remove(worker)
            self._relied_on = max(self._relied_on - 1, 0)

    def _give(self, worker: int, work: Work | None) -> None:
        if work is None or self.cancelled or self.paused:
            return
        self.method.start(work)
        self.open[worker] = work
        self.trials.setdefault(work.trial, TrialState()).worker = worker


def _check_rules(rules: int) -> None:
    if rules != RULES:
        raise HpcDetError(
            f"this search goes by rules {rules} and this hpc_det by rules {RULES}, so decisions would change; use the "
            f"version that it was submitted with, or start it again with `hpc-det experiment fork`"
        )


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The best trial by all reports to the search."""

    trial: int
    metric: str
    value: float
    length: int | None
    """At that report, in the unit of searcher.max_length."""


def best_trial(told: Iterable[Entry], searcher: Mapping[str, Any]) -> BestTrial | None:
    """`told`: the journal's entries, or those of them that are reports. None where no trial has reported a number."""
    best: BestTrial | None = None
    for entry in told:
        value = entry.get("value")
        if value is not None and better(value, best.value if best else None, searcher["smaller_is_better"]):
            best = BestTrial(trial=entry["trial"], metric=searcher["metric"], value=value, length=entry["until"])
    return best
