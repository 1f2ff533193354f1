"""The logs of a trial, or of all trials of an experiment and its jobs, merged by time into one stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from heapq import merge
from itertools import chain
from operator import attrgetter
from pathlib import Path

from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.log_lines import ATTEMPT_BEGINS, OF_WORKER
from hpc_det.view.logs.log_file import LogFile, Passage, Source, last
from hpc_det.view.logs.selection import Selection, Wanted
from hpc_det.view.state import ExperimentView

MARKED = re.compile(r"\[rank=(\d+)\] ")
"""Start of a rank's line in the job's log (hpc_det.launch.wrap_rank)."""
_place = attrgetter("place")


class TrialLogs:
    """All logs of a trial as one stream; each call continues where the last one ended."""

    def __init__(self, trial: TrialFolder, wanted: Wanted) -> None:
        self._trial = trial
        self._wanted = wanted
        self._selection = Selection(wanted)
        self._job = JobLog(trial, wanted.rank)
        self._ranks: dict[tuple[int, int], LogFile] = {}
        """Logs by attempt and rank."""
        self._oldest = 0
        """Number of the first attempt whose ranks may still print."""

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Yield the passages since the last call; with `final`, including last lines without an end.

        All logs of an attempt are open at the same time. An incomplete line is held back until it is complete or the
        attempt has ended.
        """
        self._find_ranks()
        return self._selection.of(merge(self._job.passages(final=final), self._of_ranks(final), key=_place))

    def last(self, count: int, *, final: bool = False) -> list[Passage]:
        """Return the last `count` lines of `passages`.

        Without a level to select by, logs are read backwards from their ends. The level of a line may be that of a line
        far above it, so a selection by level reads all.
        """
        if self._wanted.level is None:
            self._skip_to_last(count)
        return last(self.passages(final=final), count)

    def _of_ranks(self, final: bool) -> Iterator[Passage]:
        """Yield the new passages of all ranks, attempt by attempt."""
        attempts = self._attempts()
        for attempt in attempts:
            is_over = final or attempt < attempts[-1]
            yield from merge(*(log.passages(final=is_over) for log in self._logs_of(attempt)), key=_place)
        if len(attempts) > 1:
            self._oldest = attempts[-2]  # only ranks of the last two attempts may still print

    def _skip_to_last(self, count: int) -> None:
        self._job.skip_to_last(count)
        self._find_ranks()
        for attempt in reversed(self._attempts()):
            self._oldest = attempt
            have_enough = [log.skip_to_last(count) for log in self._logs_of(attempt)]
            if any(have_enough):  # one log is enough: older attempts have only earlier lines
                return

    def _attempts(self) -> list[int]:
        """Return the numbers of attempts, from the oldest that is needed."""
        return sorted({attempt for attempt, _ in self._ranks if attempt >= self._oldest})

    def _logs_of(self, attempt: int) -> list[LogFile]:
        """Return the logs of an attempt, in the order of their ranks."""
        return [log for (its, _), log in sorted(self._ranks.items()) if its == attempt]

    def _find_ranks(self) -> None:
        """Find ranks that have started to print since the last call."""
        for folder in self._trial.logs.glob("attempt-*"):
            attempt = _number(folder)
            for path in folder.glob("rank-*.log") if attempt >= self._oldest else ():
                rank = _number(path)
                if (attempt, rank) not in self._ranks and self._wanted.rank in (None, rank):
                    log = LogFile(path, Source(self._trial.id, attempt, rank))
                    if self._wanted.since is not None:
                        log.skip_before(self._wanted.since)
                    self._ranks[attempt, rank] = log


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


class JobLog:
    """The log of the worker, the agents and their launcher: one file for all attempts."""

    def __init__(self, trial: TrialFolder, rank: int | None) -> None:
        """Create the log. With `rank`, only lines that `wrap_rank` has marked with this rank are selected."""
        self._trial = trial
        self._rank = rank
        self._attempt = 1
        self._file = LogFile(trial.job_log, Source())

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Yield the passages since the last call, each with lines of one attempt."""
        for passage in self._file.passages(final=final):
            for part in self._by_attempt(passage):
                lines = part.lines if self._rank is None else [line for line in part.lines if self._is_wanted(line)]
                if lines:
                    yield part._replace(lines=lines)

    def skip_to_last(self, count: int) -> None:
        """Skip to the last `count` lines. With a rank, whose lines may be rare, nothing is skipped."""
        if self._rank is None:
            self._file.skip_to_last(count)
            # the skipped lines named the attempt: it is the one before the next that begins
            begins = (_begun(line) for passage in copy(self._file).passages() for line in passage.lines)
            following = next(filter(None, begins), Journal(self._trial.journal).last_attempt() + 1)
            self._attempt = max(following - 1, 1)

    def _by_attempt(self, passage: Passage) -> Iterator[Passage]:
        """Yield the passage, divided where attempts start."""
        lines: list[str] = []
        for line in passage.lines:
            if attempt := _begun(line):
                yield self._of_attempt(passage, lines)
                self._attempt, lines = attempt, []
            lines.append(line)
        yield self._of_attempt(passage, lines)

    def _of_attempt(self, passage: Passage, lines: list[str]) -> Passage:
        return passage._replace(source=Source(self._trial.id, self._attempt), lines=lines)

    def _is_wanted(self, line: str) -> bool:
        return line.startswith(f"[rank={self._rank}] ")


def _begun(line: str) -> int | None:
    """Return the attempt that starts with this line, or None."""
    found = ATTEMPT_BEGINS.fullmatch(line)
    return int(found[1]) if found else None


class ExperimentLogs:
    """All logs of an experiment; each call continues where the last one ended."""

    def __init__(self, view: ExperimentView, wanted: Wanted) -> None:
        """Create the logs. The caller updates `view`, from which new trials are taken."""
        self._view = view
        self._wanted = wanted
        self._jobs = JobsLogs(view.folder, wanted)
        self._trials: dict[int, TrialLogs] = {}

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Yield the passages since the last call: those of the jobs, then those of each trial.

        With `final`, last lines without an end are included.
        """
        trials = (logs.passages(final=final) for logs in self._logs(final))
        return chain(self._jobs.passages(final=final), chain.from_iterable(trials))

    def last(self, count: int, *, final: bool = False) -> list[Passage]:
        """Return the last `count` lines of all trials, merged by time."""
        jobs = self._jobs.passages(final=final)
        trials = [logs.last(count, final=final) for logs in self._logs(final)]
        return last(chain(jobs, merge(*trials, key=attrgetter("time"))), count)

    def _logs(self, final: bool) -> Iterator[TrialLogs]:
        for number in sorted(self._view.search.trials if final else self._active()):
            folder = self._view.folder.trial(number)
            yield self._trials.setdefault(number, TrialLogs(folder, self._wanted))

    def _active(self) -> set[int]:
        """Return the trials that may print now or were never read; the others are read again only with `final`."""
        search = self._view.search
        open_now = {work.trial for work in search.open.values()}
        return open_now | set(search.last_trial.values()) | (search.trials.keys() - self._trials.keys())


class JobsLogs:
    """Output of jobs outside trials, such as loading modules, the site's setup, and errors before the first trial.

    Lines that workers print about themselves are left out: the log of a trial shows which worker took it.
    """

    def __init__(self, experiment: ExperimentFolder, wanted: Wanted) -> None:
        """Create the logs. If a rank is selected, they have no lines: ranks print only in trials."""
        self._folder = experiment.jobs if wanted.rank is None else None
        self._selection = Selection(wanted)
        self._files: dict[str, LogFile] = {}

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        return self._selection.of(self._outside_of_trials(final))

    def _outside_of_trials(self, final: bool) -> Iterator[Passage]:
        paths = self._folder.glob("*.log") if self._folder else ()
        for path in sorted(paths, key=lambda path: [*map(int, path.stem.split("-"))]):
            file = self._files.setdefault(path.stem, LogFile(path, Source(job=path.stem)))
            for passage in file.passages(final=final):
                if lines := [line for line in passage.lines if not OF_WORKER.match(line)]:
                    yield passage._replace(lines=lines)
