"""hpc-det experiment logs: what the job and its ranks printed, attempt after attempt."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_det.cli.tail import Tail
from hpc_det.cli.watch import POLL_S, Watch, say
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.folders import ExperimentFolder, TrialFolder

# The line with which hpc_det.launch.job begins an attempt: its log is one file for all of them.
_BEGIN = re.compile(r"hpc-det: \d\d:\d\d:\d\d attempt (\d+) begins")


class Logs:
    """All logs of a trial as one stream of lines; each call goes on where the last one ended."""

    def __init__(self, trial: TrialFolder, rank: int | None = None) -> None:
        """`rank`: only its lines, without the job's."""
        self._trial = trial
        self._rank = rank
        self._job = Tail(trial.job_log)
        self._job_attempt = 1
        self._ranks: dict[tuple[int, int], Tail] = {}
        self._shown: int | None = None

    def new_lines(self, *, final: bool = False) -> Iterator[str]:
        """By attempt: its border, the job's lines, then each rank's. `final`: also lines that lack an end."""
        by_attempt: dict[int, list[str]] = {}
        if self._rank is None:
            for attempt, line in self._job_lines(final):
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
            if begin := _BEGIN.fullmatch(line):
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


def stream(experiment: ExperimentFolder, *, follow: bool, rank: int | None) -> Iterator[str]:
    """The lines so far; with `follow`, also those to come until the experiment has ended."""
    _check_rank(experiment, rank)
    logs = Logs(experiment.trial(), rank)
    if follow:
        yield from _until_the_end(logs, experiment)
    yield from logs.new_lines(final=True)


def _until_the_end(logs: Logs, experiment: ExperimentFolder) -> Iterator[str]:
    watch = Watch(experiment)
    while not (state := watch.state()).is_final:
        yield from logs.new_lines()
        time.sleep(POLL_S)
    yield from logs.new_lines(final=True)
    say(f"experiment {experiment.id}: {state.value}")


def _check_rank(experiment: ExperimentFolder, rank: int | None) -> None:
    plan = JobPlan.from_json(experiment.plan.read_text(encoding="utf-8"))
    if rank is not None and not 0 <= rank < plan.world_size:
        raise UsageError(f"--rank {rank}: experiment {experiment.id} has ranks 0 to {plan.world_size - 1}")
