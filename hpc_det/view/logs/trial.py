"""The logs of a trial: of its job, its agents and its ranks, attempt after attempt, merged by time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from heapq import merge
from operator import attrgetter
from pathlib import Path

from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.log_lines import ATTEMPT_BEGINS
from hpc_det.view.logs.log_file import LogFile
from hpc_det.view.logs.passage import Passage, Source, last
from hpc_det.view.logs.wanted import Selection, Wanted

MARKED = re.compile(r"\[rank=(\d+)\] ")
"""How a rank's line begins in the job's log (hpc_det.launch.wrap_rank)."""
_place = attrgetter("place")


class TrialLogs:
    """All logs of a trial as one stream; each call goes on where the last one ended."""

    def __init__(self, trial: TrialFolder, wanted: Wanted) -> None:
        self._trial = trial
        self._wanted = wanted
        self._selection = Selection(wanted)
        self._job = JobLog(trial, wanted.rank)
        self._ranks: dict[tuple[int, int], LogFile] = {}
        """By attempt and rank."""
        self._oldest = 0
        """The first attempt whose ranks may still have something new to say."""

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Those since the last call; `final`: also last lines without an end. All logs of an attempt are open at once.

        A line that its rank has not ended waits for its end, or for that of the attempt.
        """
        self._find_ranks()
        return self._selection.of(merge(self._job.passages(final=final), self._of_ranks(final), key=_place))

    def last(self, count: int, *, final: bool = False) -> list[Passage]:
        """The last `count` lines of what `passages` would give. Huge logs are read from their ends, where lines need
        no look at them to know whether they are wanted.
        """
        if self._wanted.level is None:
            self._skip_to_last(count)
        return last(self.passages(final=final), count)

    def _of_ranks(self, final: bool) -> Iterator[Passage]:
        attempts = self._attempts()
        for attempt in attempts:
            is_over = final or attempt < attempts[-1]
            yield from merge(*(log.passages(final=is_over) for log in self._logs_of(attempt)), key=_place)
        if len(attempts) > 1:
            self._oldest = attempts[-2]

    def _skip_to_last(self, count: int) -> None:
        self._job.skip_to_last(count)
        self._find_ranks()
        for attempt in reversed(self._attempts()):
            self._oldest = attempt
            have_enough = [log.skip_to_last(count) for log in self._logs_of(attempt)]
            if any(have_enough):
                return

    def _attempts(self) -> list[int]:
        """From the oldest on that matters."""
        return sorted({attempt for attempt, _ in self._ranks if attempt >= self._oldest})

    def _logs_of(self, attempt: int) -> list[LogFile]:
        """In the order of their ranks."""
        return [log for (its, _), log in sorted(self._ranks.items()) if its == attempt]

    def _find_ranks(self) -> None:
        """Those that have begun to print since the last look."""
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
    """What the worker, the agents and their launcher print: one file for all attempts."""

    def __init__(self, trial: TrialFolder, rank: int | None) -> None:
        """`rank`: only its lines, which `wrap_rank` has marked."""
        self._trial = trial
        self._rank = rank
        self._attempt = 1
        self._file = LogFile(trial.job_log, Source())

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        for passage in self._file.passages(final=final):
            for part in self._by_attempt(passage):
                lines = part.lines if self._rank is None else [line for line in part.lines if self._is_wanted(line)]
                if lines:
                    yield part._replace(lines=lines)

    def skip_to_last(self, count: int) -> None:
        """Go on with the last `count` lines; of one rank, which may be few, all stay."""
        if self._rank is None:
            self._file.skip_to_last(count)
            begins = (_begun(line) for passage in copy(self._file).passages() for line in passage.lines)
            following = next(filter(None, begins), Journal(self._trial.journal).last_attempt() + 1)
            self._attempt = max(following - 1, 1)

    def _by_attempt(self, passage: Passage) -> Iterator[Passage]:
        """Cut where attempts begin."""
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
    """The attempt that begins with this line."""
    found = ATTEMPT_BEGINS.fullmatch(line)
    return int(found[1]) if found else None
