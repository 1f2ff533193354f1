"""hpc-det experiment: wait for experiments, and change what their jobs do."""

from __future__ import annotations

from functools import partial

import click

from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.ids import any_experiments_argument, experiments_argument
from hpc_det.cli.several import each
from hpc_det.store.folders import ExperimentFolder


@experiment.command()
@any_experiments_argument
@click.option(
    "--poll",
    "--polling-interval",
    "poll",
    type=click.FloatRange(min=0.05, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
)
def wait(experiments: list[ExperimentFolder], poll: float) -> None:
    """Wait until experiments have ended; exit code 0 only if all are COMPLETED.

    Otherwise a sentence on stderr says why. A requeued job that the scheduler holds back is released.

    \b
    Example:
      hpc-det experiment wait 12
    """
    from hpc_det.cli import control

    each(experiments, partial(control.wait, poll_s=poll))


@experiment.command()
@experiments_argument
def pause(experiments: list[ExperimentFolder]) -> None:
    """Have the trials of experiments save, and free their nodes until `activate`.

    \b
    Example:
      hpc-det experiment pause 13
    """
    from hpc_det.cli import control

    each(experiments, control.pause)


@experiment.command()
@experiments_argument
def activate(experiments: list[ExperimentFolder]) -> None:
    """Go on with experiments that were paused.

    \b
    Example:
      hpc-det experiment activate 14
    """
    from hpc_det.cli import again

    each(experiments, again.activate)


@experiment.command()
@experiments_argument
def cancel(experiments: list[ExperimentFolder]) -> None:
    """End experiments after another checkpoint of each of their trials.

    \b
    Example:
      hpc-det experiment cancel 13
    """
    from hpc_det.cli import control

    each(experiments, control.cancel)


@experiment.command()
@experiments_argument
def kill(experiments: list[ExperimentFolder]) -> None:
    """End experiments now, with all their trials and jobs, without another checkpoint.

    \b
    Example:
      hpc-det experiment kill 13,14
    """
    from hpc_det.cli import control

    each(experiments, control.kill, side_by_side=8)  # most of it is waiting until the jobs are gone
