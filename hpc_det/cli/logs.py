"""hpc-det experiment logs, trial logs: what jobs and ranks printed, trial after trial, attempt after attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from hpc_det.cli.tail import Tail
from hpc_det.errors import UsageError
from hpc_det.launch.job.log_lines import ATTEMPT_BEGINS, OF_WORKER
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trials import TrialState, state_now
from hpc_det.view.watch import POLL_S, Watch, say


class Lines(Protocol):
    def new_lines(self, *, final: bool = False) -> Iterator[str]:
        """Those since the last call; `final`: also lines that lack an end."""


class Logs:
    """All logs of a trial as one stream of lines; each call goes on where the last one ended."""

    def __init__(self, trial: TrialFolder, rank: int | None = None) -> None:
        """`rank`: only its lines; of the job's those that `wrap_rank` has marked as this rank's."""
        self._trial = trial
        self._rank = rank
        self._job = Tail(trial.job_log)
        self._job_attempt = 1
        self._ranks: dict[tuple[int, int], Tail] = {}
        self._shown: int | None = None

    def new_lines(self, *, final: bool = False) -> Iterator[str]:
        """By attempt: its border, the job's lines, then each rank's. `final`: also lines that lack an end."""
        by_attempt: dict[int, list[str]] = {}
        for attempt, line in self._job_lines(final):
            if self._rank is None or line.startswith(f"[rank={self._rank}] "):
                by_attempt.setdefault(attempt, []).append(line)
        self._find_ranks()
        for attempt in sorted(by_attempt.keys() | {attempt for attempt, _ in self._ranks}):
            yield from self._bordered(attempt, iter(by_attempt.get(attempt, [])))
            yield from self._bordered(attempt, self._rank_lines(attempt, final))

    def _bordered(self, attempt: int, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            if self._shown != attempt:
                self._shown = attempt
                yield f"---------- attempt {attempt} ----------"
            yield line

    def _job_lines(self, final: bool) -> Iterator[tuple[int, str]]:
        for line in self._job.lines(final=final):
            if begin := ATTEMPT_BEGINS.fullmatch(line):
                self._job_attempt = int(begin[1])
            yield self._job_attempt, line

    def _rank_lines(self, attempt: int, final: bool) -> Iterator[str]:
        for (its_attempt, rank), tail in sorted(self._ranks.items()):
            if its_attempt == attempt:
                yield from (f"[rank={rank}] {line}" for line in tail.lines(final=final))

    def _find_ranks(self) -> None:
        for path in self._trial.logs.glob("attempt-*/rank-*.log"):
            key = _number(path.parent.name), _number(path.stem)
            if key not in self._ranks and self._rank in (None, key[1]):
                self._ranks[key] = Tail(path)


def _number(name: str) -> int:
    return int(Path(name).name.rpartition("-")[2])


class JobLogs:
    """What the jobs print outside of attempts: modules and setup of the site, errors before any trial began.

    Not the lines of workers: which trial one takes is known from the trial's own log.
    """

    def __init__(self, experiment: ExperimentFolder) -> None:
        self._folder = experiment.jobs
        self._tails: dict[str, Tail] = {}

    def new_lines(self, *, final: bool = False) -> Iterator[str]:
        for path in sorted(self._folder.glob("*.log"), key=lambda path: [*map(int, path.stem.split("-"))]):
            tail = self._tails.setdefault(path.stem, Tail(path))
            lines = tail.lines(final=final)
            yield from (f"[job={path.stem}] {line}" for line in lines if not OF_WORKER.match(line))


class TrialsLogs:
    """The logs of all trials, and of the jobs, as one stream."""

    def __init__(self, view: ExperimentView, rank: int | None = None) -> None:
        self._view = view
        self._rank = rank
        self._jobs = JobLogs(view.folder) if rank is None else None
        self._trials: dict[int, Logs] = {}

    def new_lines(self, *, final: bool = False) -> Iterator[str]:
        if self._jobs:
            yield from self._jobs.new_lines(final=final)
        for number in sorted(self._view.search.trials if final else self._active()):
            logs = self._trials.setdefault(number, Logs(self._view.folder.trial(number), self._rank))
            lines = logs.new_lines(final=final)
            yield from (f"[trial={number}] {line}" for line in lines) if self._view.has_many_trials else lines

    def _active(self) -> set[int]:
        """The trials that may print now, or were never read. The last words of others wait for the end."""
        search = self._view.search
        open_now = {work.trial for work in search.open.values()}
        return open_now | set(search.last_trial.values()) | (search.trials.keys() - self._trials.keys())


def stream(experiment: ExperimentFolder, *, follow: bool, rank: int | None) -> Iterator[str]:
    """The lines of all trials so far; with `follow`, also those to come until the experiment has ended."""
    watch = Watch(experiment)
    _check_rank(watch.view, rank)
    yield from _lines(TrialsLogs(watch.view, rank), watch.state if follow else None)
    if follow:
        say(f"experiment {experiment.id}: {watch.state().value}")


def stream_trial(trial: TrialFolder, *, follow: bool, rank: int | None) -> Iterator[str]:
    """The same of one trial, until it has ended."""
    experiment = trial.experiment()
    watch = Watch(experiment)
    _check_rank(watch.view, rank)

    def state() -> TrialState:
        is_over = watch.state().is_final
        return state_now(watch.view.search, trial, is_over=is_over)

    yield from _lines(Logs(trial, rank), state if follow else None)
    if follow:
        say(f"trial {experiment.id}/{trial.id}: {state().value}")


def _lines(logs: Lines, state: Callable[[], ExperimentState | TrialState] | None) -> Iterator[str]:
    """Until the `state` is final, where there is one."""
    while state and not state().is_final:
        yield from logs.new_lines()
        time.sleep(POLL_S)
    yield from logs.new_lines(final=True)


def _check_rank(view: ExperimentView, rank: int | None) -> None:
    if rank is not None and not 0 <= rank < view.plan().world_size:
        raise UsageError(f"--rank {rank}: experiment {view.id} has ranks 0 to {view.plan().world_size - 1}")
