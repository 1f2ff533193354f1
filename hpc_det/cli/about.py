"""Commands that change what is said of an experiment, and not what it does."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_det.errors import UsageError, nearest
from hpc_det.store.experiment_config import About, write_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView
from hpc_det.view.watch import state


def archive(experiment: ExperimentFolder) -> str:
    """What was done, in a sentence. Raises UsageError for one that has not ended."""
    view = ExperimentView(experiment)
    if not (found := state(view)).is_final:
        raise UsageError(
            f"experiment {experiment.id} is {found.value}; only what has ended can be archived: wait for its end, or "
            f"end it with `hpc-det experiment kill {experiment.id}`"
        )
    if view.about().archived:
        return f"Experiment {experiment.id} was archived before"
    write_about(experiment, archived=True)
    return f"Archived experiment {experiment.id}: lists show it with --all"


def unarchive(experiment: ExperimentFolder) -> str:
    """What was done, in a sentence."""
    if not _about(experiment).archived:
        return f"Experiment {experiment.id} is not archived"
    write_about(experiment, archived=False)
    return f"Unarchived experiment {experiment.id}"


def add_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    """What it has now, in a sentence."""
    known = _about(experiment).labels
    return _set_labels(experiment, [*known, *(label for label in dict.fromkeys(labels) if label not in known)])


def remove_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    """What is left, in a sentence. Raises UsageError for labels that it does not have."""
    known = _about(experiment).labels
    if absent := [label for label in labels if label not in known]:
        raise UsageError([_no_such_label(experiment, label, known) for label in absent])
    return _set_labels(experiment, [label for label in known if label not in labels])


def rename(experiment: ExperimentFolder, name: str) -> str:
    """What was done, in a sentence. Its jobs in the queue keep their name."""
    former = _about(experiment).name
    write_about(experiment, name=name)
    return f"Renamed experiment {experiment.id}: {former} is now {name}"


def describe_as(experiment: ExperimentFolder, description: str) -> str:
    """What was done, in a sentence."""
    write_about(experiment, description=description)
    return f"Described experiment {experiment.id}: {description or 'nothing'}"


def _about(experiment: ExperimentFolder) -> About:
    return ExperimentView(experiment).about()


def _set_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    write_about(experiment, labels=list(labels))
    return f"Experiment {experiment.id} has labels: {', '.join(labels) or 'none'}"


def _no_such_label(experiment: ExperimentFolder, label: str, known: Sequence[str]) -> str:
    hint = nearest(label, known) or (f"it has {', '.join(known)}" if known else "it has none")
    return f"experiment {experiment.id}: has no label {label!r}; {hint}"
