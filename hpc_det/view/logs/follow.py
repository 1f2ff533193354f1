"""Follow logs until their experiment or trial has ended, and write the lines of passages with their source."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeVar

from hpc_det.errors import UsageError
from hpc_det.view.logs.log_file import Passage, Source
from hpc_det.view.logs.selection import LEVELS, Wanted
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trials import TrialState
from hpc_det.view.watch import POLL_S

State = TypeVar("State", bound=ExperimentState | TrialState)


class Logs(Protocol):
    """The logs of an experiment or of a trial. With `final`, last lines without an end are included."""

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Yield the passages since the last call."""

    def last(self, count: int, *, final: bool = False) -> list[Passage]:
        """Return the last `count` lines."""


def existing(logs: Logs, tail: int | None, *, final: bool) -> Iterator[Passage]:
    """Yield the passages that exist now, or with `tail` those with that number of last lines.

    `final`: last lines without an end are included.
    """
    yield from logs.passages(final=final) if tail is None else logs.last(tail, final=final)


def followed(
    logs: Logs, state: Callable[[], State], before_pause: Callable[[], object] = lambda: None
) -> Generator[Passage, None, State]:
    """Yield new passages until the state is final, and return the final state.

    `before_pause` is called before each pause between two reads, for instance to flush an output.
    """
    while not (found := state()).is_final:
        before_pause()
        time.sleep(POLL_S)
        yield from logs.passages()
    yield from logs.passages(final=True)  # what was written between the last read and the end
    return found


def of_rank(view: ExperimentView, rank: int | None, *, since: float | None = None, level: str | None = None) -> Wanted:
    """Return the selection of lines, of one rank or all. Raises UsageError for a rank or level that does not exist."""
    if level is not None and level not in LEVELS:
        raise UsageError(f"level {level!r}: unknown; the levels are {', '.join(LEVELS)}")
    if rank is not None and not 0 <= rank < view.plan().world_size:
        raise UsageError(f"rank {rank}: experiment {view.id} has ranks 0 to {view.plan().world_size - 1}")
    return Wanted(rank=rank, since=since, level=level)


def source_in_words(source: Source, *, names_trials: bool) -> str:
    """Return the text before a line that names the job, or the trial if there are several; the rank is not named."""
    job = f"[job={source.job}] " if source.job else ""
    return job + (f"[trial={source.trial}] " if names_trials and source.trial else "")


def rank_in_words(source: Source) -> str:
    """Return the text before a line that names its rank; "" for the output of a job or launcher."""
    return f"[rank={source.rank}] " if source.rank is not None else ""


def text_lines(
    logs: Logs, state: Callable[[], State], *, follow: bool, tail: int | None, names_trials: bool
) -> Iterator[str]:
    """Yield the lines that exist now, and with `follow` new ones until the state is final, each after its source."""
    yield from lines_of(existing(logs, tail, final=not follow), names_trials=names_trials)
    if follow:
        yield from lines_of(followed(logs, state), names_trials=names_trials)


def lines_of(passages: Iterator[Passage], *, names_trials: bool) -> Iterator[str]:
    """Yield each line after its source, without the end of the line."""
    for passage in passages:
        begin = source_in_words(passage.source, names_trials=names_trials) + rank_in_words(passage.source)
        for line in passage.lines:
            yield f"{begin}{line}"
