"""The question before something is deleted for good."""

from __future__ import annotations

import sys

import click

from hpc_det.errors import HpcDetError, UsageError

yes_option = click.option("-y", "--yes", is_flag=True, help="Do it without asking.")


def confirm(question: str, *, yes: bool) -> None:
    """Returns where the answer is yes. Raises HpcDetError where it is no, UsageError where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is there to answer; add --yes")
    if not click.confirm(question, err=True):
        raise HpcDetError("nothing was changed")
