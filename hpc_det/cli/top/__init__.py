"""hpc-det top: a live screen of all experiments.

Threads read the files and query the schedulers, which may be slow; the widgets only show their results.
"""

from __future__ import annotations

import sys

import click

from hpc_det.client.lookup import store
from hpc_det.errors import UsageError


@click.command()
def top() -> None:
    """Watch all experiments and their jobs on one screen.

    Keys: p pauses the selected experiment, a activates it, k kills it after confirmation, l follows its logs, enter
    shows its details, / filters by part of a name, state or ID, q quits.

    \b
    Example:
      hpc-det top
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top: stdin or stdout is not a terminal; use `hpc-det experiment list` instead")
    from hpc_det.cli.top.app import show  # loads textual

    show(store())
