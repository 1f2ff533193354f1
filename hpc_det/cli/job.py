"""hpc-det job: what the scheduler does with an experiment's job."""

from __future__ import annotations

import click

from hpc_det.cli.group import Group
from hpc_det.cli.parameters import experiment_argument
from hpc_det.store.folders import ExperimentFolder


@click.group(cls=Group)
def job() -> None:
    """What the scheduler does with an experiment's job."""


@job.command()
@experiment_argument
def release(experiment: ExperimentFolder) -> None:
    """Let a requeued job start now.

    Slurm holds a job that went back into the queue for two minutes. ID is the experiment's.

    \b
    Example:
      hpc-det job release 12
    """
    from hpc_det.cli.control import release_hold

    click.echo(release_hold(experiment))
