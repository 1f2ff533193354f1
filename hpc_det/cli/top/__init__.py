"""hpc-det top: all experiments on one screen, live. Threads ask files and schedulers; what is shown is plain data."""

from __future__ import annotations

import sys

import click

from hpc_det.cli.arguments import store
from hpc_det.errors import UsageError


@click.command()
def top() -> None:
    """Watch all experiments and their jobs on one screen.

    Keys: p pauses the selected experiment, a activates it, k kills it after a question, l follows its logs, enter shows
    its details, / looks for a part of a name, a state or an id, q quits.

    \b
    Example:
      hpc-det top
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top: this is no terminal; see the same with `hpc-det experiment list`")
    from hpc_det.cli.top.app import show

    show(store())
