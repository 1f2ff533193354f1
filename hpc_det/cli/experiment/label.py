"""hpc-det experiment label: words to find experiments by."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hpc_det.cli.actions import each
from hpc_det.cli.groups import Group
from hpc_det.cli.ids import experiments_argument
from hpc_det.cli.parameters import words
from hpc_det.errors import UsageError, nearest
from hpc_det.store.experiment_config import write_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView

labels_argument = click.argument("labels", metavar="LABEL...", nargs=-1, required=True, type=words)


@click.group(cls=Group)
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
    each(experiments, lambda experiment: add_labels(experiment, labels))


@label.command()
@experiments_argument
@labels_argument
def remove(experiments: list[ExperimentFolder], labels: tuple[str, ...]) -> None:
    """Take labels from experiments.

    \b
    Example:
      hpc-det experiment label remove 12 digits
    """
    each(experiments, lambda experiment: remove_labels(experiment, labels))


def add_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    """What it has now, in a sentence."""
    known = ExperimentView(experiment).about().labels
    return _set_labels(experiment, [*known, *(label for label in dict.fromkeys(labels) if label not in known)])


def remove_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    """What is left, in a sentence. Raises UsageError for labels that it does not have."""
    known = ExperimentView(experiment).about().labels
    if absent := [label for label in labels if label not in known]:
        raise UsageError([_no_such_label(experiment, label, known) for label in absent])
    return _set_labels(experiment, [label for label in known if label not in labels])


def _set_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    write_about(experiment, labels=list(labels))
    return f"Experiment {experiment.id} has labels: {', '.join(labels) or 'none'}"


def _no_such_label(experiment: ExperimentFolder, label: str, known: Sequence[str]) -> str:
    hint = nearest(label, known) or (f"it has {', '.join(known)}" if known else "it has none")
    return f"experiment {experiment.id}: has no label {label!r}; {hint}"
