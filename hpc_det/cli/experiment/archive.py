"""hpc-det experiment archive and unarchive: hide finished experiments from listings, and show them again."""

from __future__ import annotations

import click

from hpc_det.cli.arguments import experiments_argument
from hpc_det.cli.output import each
from hpc_det.errors import UsageError
from hpc_det.store.experiment_config import write_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView
from hpc_det.view.watch import state


@click.command()
@experiments_argument
def archive(experiments: list[ExperimentFolder]) -> None:
    """Hide finished experiments from listings.

    \b
    Example:
      hpc-det experiment archive 12
    """
    each(experiments, archive_one)


@click.command()
@experiments_argument
def unarchive(experiments: list[ExperimentFolder]) -> None:
    """Show archived experiments in listings again.

    \b
    Example:
      hpc-det experiment unarchive 12
    """
    each(experiments, unarchive_one)


def archive_one(experiment: ExperimentFolder) -> str:
    """Archive an experiment and return a sentence for the user. Raises UsageError if it has not ended."""
    view = ExperimentView(experiment)
    if not (found := state(view)).is_final:
        raise UsageError(
            f"experiment {experiment.id} is {found.value}; only a finished experiment can be archived: wait for its "
            f"end, or end it with `hpc-det experiment kill {experiment.id}`"
        )
    if view.about().archived:
        return f"Experiment {experiment.id} is already archived"
    write_about(experiment, archived=True)
    return f"Archived experiment {experiment.id}; `hpc-det experiment list --all` shows it"


def unarchive_one(experiment: ExperimentFolder) -> str:
    """Show an experiment in listings again, and return a sentence for the user."""
    if not ExperimentView(experiment).about().archived:
        return f"Experiment {experiment.id} is not archived"
    write_about(experiment, archived=False)
    return f"Unarchived experiment {experiment.id}"
