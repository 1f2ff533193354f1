"""hpc-det experiment pause, cancel and kill: stop the trials and jobs of experiments."""

from __future__ import annotations

import click

from hpc_det.cli.arguments import experiments_argument
from hpc_det.cli.output import each
from hpc_det.client.stopping import cancel_one, kill_one, pause_one
from hpc_det.store.folders import ExperimentFolder


@click.command()
@experiments_argument
def pause(experiments: list[ExperimentFolder]) -> None:
    """Save a checkpoint of each trial, then free the nodes until `activate`.

    \b
    Example:
      hpc-det experiment pause 13
    """
    each(experiments, pause_one)


@click.command()
@experiments_argument
def cancel(experiments: list[ExperimentFolder]) -> None:
    """Save a checkpoint of each trial, then end the experiments.

    \b
    Example:
      hpc-det experiment cancel 13
    """
    each(experiments, cancel_one)


@click.command()
@experiments_argument
def kill(experiments: list[ExperimentFolder]) -> None:
    """End experiments at once, with all trials and jobs, without saving checkpoints.

    \b
    Example:
      hpc-det experiment kill 13,14
    """
    each(experiments, kill_one, side_by_side=8)  # most of the time is spent waiting for the jobs to end
