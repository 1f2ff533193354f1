"""hpc-det experiment set: what an owner changes after the submission."""

from __future__ import annotations

import click

from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.parameters import Words, each, experiments_argument
from hpc_det.store.folders import ExperimentFolder


@experiment.group("set")
def set_() -> None:
    """Change what is said of experiments, and what is kept of them."""


@set_.command()
@experiments_argument
@click.argument("name", type=Words())
def name(experiments: list[ExperimentFolder], name: str) -> None:
    """Give experiments another name.

    \b
    Example:
      hpc-det experiment set name 12 digits-wide
    """
    from hpc_det.cli import about

    each(experiments, lambda experiment: about.rename(experiment, name))


@set_.command()
@experiments_argument
@click.argument("description")
def description(experiments: list[ExperimentFolder], description: str) -> None:
    """Say in free text what experiments are about.

    \b
    Example:
      hpc-det experiment set description 12 "with dropout, for the paper"
    """
    from hpc_det.cli import about

    each(experiments, lambda experiment: about.describe_as(experiment, description))


@set_.command("max-slots")
@experiments_argument
@click.argument("slots", type=click.IntRange(min=1))
def max_slots(experiments: list[ExperimentFolder], slots: int) -> None:
    """Limit the slots that all trials of an experiment have together.

    The jobs that are in the queue keep their limit; `pause` and `activate` make others.

    \b
    Example:
      hpc-det experiment set max-slots 13 4
    """
    from hpc_det.cli import again

    each(experiments, lambda experiment: again.set_max_slots(experiment, slots))
