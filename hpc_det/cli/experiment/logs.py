"""hpc-det experiment logs and trial logs: the output of jobs and ranks, for people and for programs."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.cli.commands import bundle
from hpc_det.cli.output import Output, log_line, output_options
from hpc_det.client.lookup import created_trial
from hpc_det.errors import UsageError, say, visible
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.local_run import is_local, run_of_driver
from hpc_det.view.attempt_sentences import attempt_in_words
from hpc_det.view.formatting import date_and_time, iso
from hpc_det.view.logs.follow import Logs, existing, followed, of_rank, rank_in_words, source_in_words
from hpc_det.view.logs.log_file import Passage, Source, first
from hpc_det.view.logs.merged import MARKED, ExperimentLogs, TrialLogs
from hpc_det.view.logs.selection import LEVELS, Levels, Wanted
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import read_attempts
from hpc_det.view.trials import TrialState, state_now
from hpc_det.view.watch import Watch

_COUNT = click.IntRange(min=0)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d{1,9})([smhdw])")


@dataclass(frozen=True, kw_only=True)
class LogChoices:
    """The lines to show, and their format."""

    follow: bool = False
    rank: int | None = None
    head: int | None = None
    tail: int | None = None
    level: str | None = None
    since: float | None = None
    timestamps: bool = False
    output: Output

    def __post_init__(self) -> None:
        if self.head is not None and self.tail is not None:
            raise UsageError(f"--head {self.head}: conflicts with --tail {self.tail}; give one of them")


def moment(text: str) -> float:
    """Return a time or an age, such as 2h, in seconds since the epoch. Raises BadParameter."""
    if age := _AGE.fullmatch(text):
        return time.time() - int(age[1]) * _UNITS_S[age[2]]
    try:
        # Python 3.10 does not parse Z
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError):
        expected = "expected a time such as 2026-11-20T10:00, or an age such as 10m, 2h or 1d"
        raise click.BadParameter(f"{text!r} is not a time; {expected}") from None


log_options = bundle(
    "choices",
    LogChoices,
    click.option("-f", "--follow", is_flag=True, help="Print new lines until the end, across requeues and pauses."),
    click.option("--rank", "--rank-id", "rank", type=int, metavar="R", help="Only the lines of this rank."),
    click.option("--head", type=_COUNT, metavar="N", help="Only the first N lines."),
    click.option("--tail", type=_COUNT, metavar="N", help="Only the last N lines, and with --follow the new ones."),
    click.option("--level", type=click.Choice(LEVELS, case_sensitive=False), help="Only lines of this level or above."),
    click.option("--since", type=moment, metavar="TIME", help="Only lines since a time, or 10m, 2h, 1d ago."),
    click.option("-T", "--timestamps", is_flag=True, help="Begin each line with the time when it was written."),
    output_options,
)
"""Decorator: the command receives all flags as one argument `choices`."""


@click.command()
@any_experiment_argument
@click.option("--trial", type=int, metavar="T", help="Only the lines of this trial.")
@log_options
def logs(experiment: ExperimentFolder, trial: int | None, choices: LogChoices) -> None:
    """Print the output of jobs and ranks, by attempt and merged by time.

    Lines of a rank begin with [rank=R], lines of a job outside any attempt with [job=J], and if there are several
    trials, their lines with [trial=T]. Trials are printed in sequence, except with --tail and for new lines of
    --follow. --follow also releases a requeued job that the scheduler holds.

    Log levels are recognised in the usual formats. A line without a level has the level of the line above it, or INFO
    if it was printed later.

    \b
    Example:
      hpc-det experiment logs 12 --follow --rank 0
      hpc-det experiment logs 12 --since 2h --level WARNING
      hpc-det experiment logs 12 --tail 1 --json
      {"time": "2026-11-20T10:02:09+01:00", "trial": 1, "attempt": 1,
       "rank": 0, "job": null, "level": "INFO", "line": "epoch 3"}
    `job` is the name of the job's log for a line outside any attempt, otherwise null.
    """
    if trial is None:
        print_experiment(experiment, choices)
    else:
        print_trial(created_trial(experiment, trial), choices)


FIELDS = ("time", *Source._fields, "level", "line")  # of a line's record
State = ExperimentState | TrialState


def print_experiment(experiment: ExperimentFolder, choices: LogChoices) -> None:
    """Print the logs of all trials; with `follow`, also new lines until the experiment has ended."""
    watch = Watch(experiment)
    logs = ExperimentLogs(watch.view, _wanted(watch.view, choices))
    text = Text(watch.view, choices, names_trials=watch.view.has_many_trials)
    of = _Of(f"experiment {experiment.id}", experiment, watch.state, f"experiment kill {experiment.id}")
    if choices.follow and _is_in_terminal(experiment):
        _say_why_none(of, choices)  # before the wait for its end
    if not _print(_passages(logs, choices, of), choices, text) and not choices.follow:
        _say_why_none(of, choices)


def print_trial(trial: TrialFolder, choices: LogChoices) -> None:
    """Print the logs of one trial; with `follow`, also new lines until the trial has ended."""
    watch = Watch(trial.experiment())

    def state() -> TrialState:
        is_over = watch.state().is_final
        return state_now(watch.view.search, trial, is_over=is_over)

    logs = TrialLogs(trial, _wanted(watch.view, choices))
    text = Text(watch.view, choices, names_trials=False)
    number = f"{watch.view.id}/{trial.id}"
    of = _Of(f"trial {number}", watch.view.folder, state, f"trial kill {number}")
    if not _print(_passages(logs, choices, of), choices, text) and not choices.follow:
        _say_why_none(of, choices)


@dataclass(frozen=True)
class _Of:
    """The experiment or trial whose logs are printed."""

    name: str
    experiment: ExperimentFolder
    state: Callable[[], State]
    kill: str
    """The command that ends it, for its owner."""


def _say_why_none(of: _Of, choices: LogChoices) -> None:
    """Print a note on stderr that no line was shown, and what to do."""
    chosen = {"--rank": choices.rank, "--since": choices.since, "--level": choices.level}
    options = [option for option, value in chosen.items() if value is not None]
    named = of.experiment.named()
    if _is_in_terminal(of.experiment):
        say(
            f"{of.name}: a run outside a job has no logs, since its output is in the terminal where its script was "
            f"started; see its state with `hpc-det experiment describe {named}`"
        )
    elif options:
        say(f"{of.name}: no line matches {' and '.join(options)}")
    else:
        settled = ExperimentView(of.experiment).settled()
        waits = "" if settled and settled.is_final else f", and `hpc-det experiment logs -f {named}` waits for lines"
        say(f"{of.name}: no logs; `hpc-det experiment describe {named}` shows its state{waits}")


def _is_in_terminal(experiment: ExperimentFolder) -> bool:
    """Return whether the output is in the terminal alone: of a script outside a job that is its own only rank."""
    return is_local(experiment) and run_of_driver(experiment) is None


def _wanted(view: ExperimentView, choices: LogChoices) -> Wanted:
    """Return the selection of lines; raise UsageError for a rank that does not exist."""
    try:
        return of_rank(view, choices.rank, since=choices.since, level=choices.level)
    except UsageError as error:
        raise UsageError([f"--{problem}" for problem in error.problems]) from None


def _passages(logs: Logs, choices: LogChoices, of: _Of) -> Iterator[Passage]:
    """Yield the existing lines and, with `follow`, new lines until the state is final."""
    yield from existing(logs, choices.tail, final=not choices.follow)
    if choices.follow:
        try:
            found = yield from followed(logs, of.state, sys.stdout.flush)
        except KeyboardInterrupt:
            end = f"; end it with `hpc-det {of.kill}`" if of.experiment.is_own() else ""
            say(f"stopped following; {of.name} continues{end}")
            raise
        sys.stdout.flush()
        say(f"{of.name}: {found.value}")


def _print(passages: Iterator[Passage], choices: LogChoices, text: Text) -> bool:
    """Print the passages; return whether there was one, or the output is for programs."""
    _open_many_files()
    shown = passages if choices.head is None else first(passages, choices.head)
    if not choices.output.is_for_people:
        choices.output.stream(_records(shown), FIELDS)
        return True
    some = False
    for passage in shown:
        some = True
        sys.stdout.write(text.of(passage))
    return some or 0 in (choices.head, choices.tail)


def _open_many_files() -> None:
    """Raise the limit of open files to the maximum that is allowed."""
    # the logs of all ranks of an attempt are open at the same time, and so are their files of times
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Text:
    """The format of log lines for people: each line after its source, and a border where an attempt begins."""

    def __init__(self, view: ExperimentView, choices: LogChoices, *, names_trials: bool) -> None:
        self._view = view
        self._has_times = choices.timestamps
        self._names_trials = names_trials
        self._shown: dict[int, int] = {}
        """The number of the attempt that was shown last, keyed by trial."""

    def of(self, passage: Passage) -> str:
        """Return the lines of the passage, below a border if it is the first of its attempt."""
        source = passage.source
        begin = f"{date_and_time(passage.time)} " if self._has_times else ""
        begin += source_in_words(source, names_trials=self._names_trials)
        border = f"{begin}{visible(self._border(source))}\n" if self._is_new(source) else ""
        begin += rank_in_words(source)
        return border + "".join([f"{begin}{log_line(line)}\n" for line in passage.lines])

    def _is_new(self, source: Source) -> bool:
        """Return whether these are the first lines of an attempt that are shown."""
        if source.trial is None or source.attempt is None or self._shown.get(source.trial) == source.attempt:
            return False
        self._shown[source.trial] = source.attempt
        return True

    def _border(self, source: Source) -> str:
        """Return a line about the attempt: its host, its start and, if it has ended, its end."""
        attempts = read_attempts(self._view.folder.trial(source.trial or 0))
        known = (
            attempt_in_words(each, time.time(), is_over=False) for each in attempts if each.number == source.attempt
        )
        return f"---------- {next(known, f'attempt {source.attempt}')} ----------"


def _records(passages: Iterable[Passage]) -> Iterator[dict[str, Any]]:
    levels = Levels()
    for passage in passages:
        begin = {"time": iso(passage.time), **passage.source._asdict()}
        for line, level in zip(passage.lines, passage.levels or levels.of(passage), strict=True):
            # in a log that several ranks share, each line begins with its rank
            if passage.source.rank is None and (marked := MARKED.match(line)):
                yield {**begin, "rank": int(marked[1]), "level": level, "line": line[marked.end() :]}
            else:
                yield {**begin, "level": level, "line": line}
