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

    Keys for the selected experiment: p pauses it, a activates it, c cancels it, k kills it, l follows its logs, enter
    shows its details. r shows your waiting jobs and changes their order, priority or hold. / filters by part of a name,
    state or ID, ? shows the keys, q quits. p, c and k ask for confirmation.

    Columns that do not fit into the terminal are left out, the least useful first. ETA is the time that is left at the
    mean pace: of the attempt for a single trial, of the whole search for several.

    \b
    Example:
      hpc-det top
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("top: stdin or stdout is not a terminal; use `hpc-det experiment list` instead")
    from hpc_det.cli.top.app import show  # loads textual

    show(store())
