"""hpc-det job: show the scheduler's queue, and hold, release or reorder the user's jobs."""

from __future__ import annotations

import click

from hpc_det.cli.commands import Group, LazyCommand

COMMANDS = (
    LazyCommand("hold", "job.hold", "Keep jobs from starting until `release`."),
    LazyCommand("list", "job.list", "Show the queue of a pool, in scheduling order."),
    LazyCommand("release", "job.hold", "Allow held jobs to start."),
    LazyCommand("update", "job.update", "Change the priority, pool or position of waiting jobs."),
    LazyCommand("update-batch", "job.update", "Change several jobs in sequence: either all changes apply, or none."),
)


@click.group(cls=Group, lazy=COMMANDS)
def job() -> None:
    """Show the queue, and hold, release or reorder your jobs."""
