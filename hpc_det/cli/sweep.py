"""What `run --multirun` does with a sweep."""

from __future__ import annotations

import click

from hpc_det.cli.create import say_notes, show_and_submit
from hpc_det.cli.parameters import Choices
from hpc_det.config.problems import printable
from hpc_det.config.request import for_test
from hpc_det.config.sweep import Sweep, effective_sweep
from hpc_det.errors import UsageError


def submit_or_show_sweep(sweep: Sweep, choices: Choices) -> None:
    """One experiment with a trial for each point."""
    if choices.local:
        raise UsageError("--local: trains one trial in this process, and a sweep has many; leave out --multirun")
    found = effective_sweep(sweep.with_requests(for_test) if choices.test else sweep)
    say_notes(found)
    show_and_submit(found, choices)
    if choices.dry_run or choices.explain:
        for number, point in enumerate(sweep.points, 1):
            click.echo(f"# trial {number}: {printable(' '.join(point.overrides))}")
