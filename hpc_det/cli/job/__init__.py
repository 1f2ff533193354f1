"""hpc-det job: the scheduler's queue, and the places of one's jobs in it."""

from __future__ import annotations

import click

from hpc_det.cli.commands import Group, LazyCommand

COMMANDS = (
    LazyCommand("hold", "job.hold", "Keep jobs from starting, until `release`."),
    LazyCommand("list", "job.list", "Show the queue of a pool, in scheduling order."),
    LazyCommand("release", "job.hold", "Let jobs start that are held."),
    LazyCommand("update", "job.update", "Change the places of jobs that wait."),
    LazyCommand("update-batch", "job.update", "Change several jobs, one after the other: all or nothing."),
)


@click.group(cls=Group, lazy=COMMANDS)
def job() -> None:
    """Look at the queue, and change places in it."""
