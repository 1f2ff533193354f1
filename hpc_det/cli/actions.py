"""What a command does with each of several things, and the question before something is deleted for good."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import click

from hpc_det.cli.output import show
from hpc_det.errors import HpcDetError, UsageError, refused

Thing = TypeVar("Thing")


Made = TypeVar("Made")


def at_once(things: Sequence[Thing], act: Callable[[Thing], Made]) -> list[Made]:
    """What came of each. What fails for one keeps nobody from the others; raises HpcDetError with all that failed."""
    made: list[Made] = []
    failed: list[HpcDetError] = []
    for thing in things:
        try:
            made.append(act(thing))
        except HpcDetError as error:
            failed.append(error)
        except OSError as error:
            failed.append(refused(error))
    if failed:
        kind = UsageError if all(isinstance(error, UsageError) for error in failed) else HpcDetError
        raise kind([problem for error in failed for problem in error.problems])
    return made


def each(things: Sequence[Thing], act: Callable[[Thing], str | None], *, side_by_side: int = 1) -> None:
    """Do it to each, so many at a time, and say what came of it in their order."""
    from concurrent.futures import ThreadPoolExecutor  # it takes a third of the time of a small command

    def tell(said: str | None) -> None:
        if said:
            show(said)

    if side_by_side == 1:  # in this thread, so that Ctrl-C ends what waits
        at_once(things, lambda thing: tell(act(thing)))
        return
    with ThreadPoolExecutor(side_by_side) as workers:
        at_once([workers.submit(act, thing) for thing in things], lambda said: tell(said.result()))


yes_option = click.option("-y", "--yes", is_flag=True, help="Do it without asking.")


def confirm(question: str, *, yes: bool) -> None:
    """Returns where the answer is yes. Raises HpcDetError where it is no, UsageError where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is there to answer; add --yes")
    if not click.confirm(question, err=True):
        raise HpcDetError("nothing was changed")
