"""hpc-det experiment: labels, names, and what lists leave out."""

from __future__ import annotations

import click

from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.ids import experiments_argument
from hpc_det.cli.parameters import words
from hpc_det.cli.several import each
from hpc_det.store.folders import ExperimentFolder

labels_argument = click.argument("labels", metavar="LABEL...", nargs=-1, required=True, type=words)


@experiment.command()
@experiments_argument
def archive(experiments: list[ExperimentFolder]) -> None:
    """Have lists leave out experiments that have ended.

    \b
    Example:
      hpc-det experiment archive 12
    """
    from hpc_det.cli import about

    each(experiments, about.archive)


@experiment.command()
@experiments_argument
def unarchive(experiments: list[ExperimentFolder]) -> None:
    """Have lists show experiments again.

    \b
    Example:
      hpc-det experiment unarchive 12
    """
    from hpc_det.cli import about

    each(experiments, about.unarchive)


@experiment.group()
def label() -> None:
    """Words to find experiments by."""


@label.command()
@experiments_argument
@labels_argument
def add(experiments: list[ExperimentFolder], labels: tuple[str, ...]) -> None:
    """Give experiments more labels.

    \b
    Example:
      hpc-det experiment label add 12 baseline paper
    """
    from hpc_det.cli import about

    each(experiments, lambda experiment: about.add_labels(experiment, labels))


@label.command()
@experiments_argument
@labels_argument
def remove(experiments: list[ExperimentFolder], labels: tuple[str, ...]) -> None:
    """Take labels from experiments.

    \b
    Example:
      hpc-det experiment label remove 12 digits
    """
    from hpc_det.cli import about

    each(experiments, lambda experiment: about.remove_labels(experiment, labels))
