"""hpc-det experiment set and label: change an experiment after its submission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from hpc_det.checkpoint.retention import policies_of
from hpc_det.checkpoint.storage import Superfluous, superfluous_in
from hpc_det.cli.arguments import experiments_argument, words
from hpc_det.cli.commands import Group
from hpc_det.cli.job.update import update_jobs
from hpc_det.cli.output import at_once, confirm, each, yes_option
from hpc_det.config.merge import Tree
from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError, count, nearest, say
from hpc_det.node.json_files import read_json, read_map
from hpc_det.store.experiment_config import write_about, write_secrets
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.again import set_once_more
from hpc_det.submit.submission import write_config, write_effective
from hpc_det.view.formatting import size
from hpc_det.view.state import ExperimentView, effective_config
from hpc_det.view.watch import beginning_with, states

_COUNT = click.IntRange(min=0)


@click.group("set", cls=Group)
def set_() -> None:
    """Change the name, description, limits, priority or retention of experiments."""


@set_.command()
@experiments_argument
@click.argument("name", type=words)
def name(experiments: list[ExperimentFolder], name: str) -> None:
    """Rename experiments.

    \b
    Example:
      hpc-det experiment set name 12 digits-wide
    """
    each(experiments, lambda experiment: rename(experiment, name))


@set_.command()
@experiments_argument
@click.argument("description")
def description(experiments: list[ExperimentFolder], description: str) -> None:
    """Set the description of experiments, any text.

    \b
    Example:
      hpc-det experiment set description 12 "with dropout, for the paper"
    """
    each(experiments, lambda experiment: describe_as(experiment, description))


@set_.command("max-slots")
@experiments_argument
@click.argument("slots", type=click.IntRange(min=1))
def max_slots(experiments: list[ExperimentFolder], slots: int) -> None:
    """Limit the total number of slots of all trials of an experiment.

    Jobs that are already in the queue keep their limit; `pause` and `activate` replace them.

    \b
    Example:
      hpc-det experiment set max-slots 13 4
    """
    each(experiments, lambda experiment: set_max_slots(experiment, slots))


@set_.command("gc-policy")
@experiments_argument
@click.option("--save-experiment-best", type=_COUNT, metavar="N", help="Keep the best N of the experiment.")
@click.option("--save-trial-best", type=_COUNT, metavar="N", help="Keep the best N of each trial.")
@click.option("--save-trial-latest", type=_COUNT, metavar="N", help="Keep the latest N of each trial.")
@yes_option
def gc_policy(experiments: list[ExperimentFolder], yes: bool, **limits: int | None) -> None:
    """Change how many checkpoints experiments keep.

    For a finished experiment, the checkpoints that the new policy does not keep are listed and, after confirmation,
    deleted. A running experiment applies the new policy from its next checkpoint on; deleted checkpoints are not
    restored.

    \b
    Example:
      hpc-det experiment set gc-policy 12 --save-experiment-best 1 \\
          --save-trial-best 0 --save-trial-latest 0 --yes
    """
    counts = {key: count for key, count in limits.items() if count is not None}
    if not counts:
        raise UsageError(
            "set gc-policy: give at least one of --save-experiment-best, --save-trial-best and --save-trial-latest"
        )
    ended = {number: state.is_final for number, state in states(at_once(experiments, ExperimentView)).items()}
    changes = at_once(experiments, lambda experiment: _change(experiment, counts, has_ended=ended[experiment.id]))
    gone = [found for change in changes for found in change.gone]
    if gone:
        total = size(sum(found.checkpoint.size_bytes for found in gone))
        click.echo("\n".join(map(_in_words, gone)))
        for warning in beginning_with([found.checkpoint.path for found in gone], experiments[0].root()):
            say(f"warning: {warning}")
        confirm(f"Delete {count(len(gone), 'checkpoint')} ({total}) for good?", yes=yes)
    each(changes, _apply)


@set_.command()
@experiments_argument
@click.argument("priority", metavar="N")
def priority(experiments: list[ExperimentFolder], priority: str) -> None:
    """Change the priority of the jobs of experiments: from 1 to 99, lower starts earlier.

    Applies `hpc-det job update` to all their waiting jobs.

    \b
    Example:
      hpc-det experiment set priority 15 60
    """
    click.echo("\n".join(update_jobs(experiments, priority)))


def rename(experiment: ExperimentFolder, name: str) -> str:
    """Rename an experiment and return a sentence for the user. Jobs in the queue keep their name."""
    former = ExperimentView(experiment).about().name
    write_about(experiment, name=name)
    return f"Renamed experiment {experiment.id}: {former} is now {name}"


def describe_as(experiment: ExperimentFolder, description: str) -> str:
    """Set the description and return a sentence for the user."""
    write_about(experiment, description=description)
    return f"Described experiment {experiment.id}: {description or 'nothing'}"


def set_max_slots(experiment: ExperimentFolder, slots: int) -> str:
    """Set the limit and return a sentence for the user. Raises UsageError if it is too low for one trial."""
    needed = effective_config(experiment)["resources"]["slots_per_trial"]
    if slots < needed:
        raise UsageError(
            f"experiment {experiment.id}: max-slots {slots}: one trial needs {count(needed, 'slot')}; give at least "
            "that many"
        )
    set_once_more(experiment, [f"resources.max_slots={slots}"])
    return f"Experiment {experiment.id} has at most {count(slots, 'slot')}, from its next jobs on"


@dataclass(frozen=True)
class Change:
    """The change of an experiment's checkpoint retention."""

    experiment: ExperimentFolder
    config: Tree
    """The effective configuration with the new policy."""
    points: list[Tree]
    """The configuration of each point of a multirun, with the new policy; empty for other experiments."""
    origins: dict[str, str]
    """The layer that set each key of `config`."""
    has_ended: bool
    gone: list[Superfluous]
    """The checkpoints that the new policy does not keep; empty if the experiment has not ended."""


def _in_words(found: Superfluous) -> str:
    trial, checkpoint = found.storage.trial, found.checkpoint
    whose = f"trial {trial.experiment().id}/{trial.id} at batch {checkpoint.steps}"
    return f"{checkpoint.uuid} of {whose}, {size(checkpoint.size_bytes)}, is not kept"


def _change(experiment: ExperimentFolder, counts: Mapping[str, int], *, has_ended: bool) -> Change:
    config = _with(effective_config(experiment), counts)
    points = [_with(point, counts) for point in read_json(experiment.points) or []]
    origins = {**(read_map(experiment.origin) or {}), **{f"checkpoint_storage.{key}": "config" for key in counts}}
    gone = superfluous_in(experiment, policies_of(config, points)) if has_ended else []
    return Change(experiment, config, points, origins, has_ended, gone)


def _with(tree: Tree, counts: Mapping[str, int]) -> Tree:
    """Return the configuration with the new counts, if it has a `checkpoint_storage`."""
    # a point of a multirun has one only if it sets its own policy
    storage = tree.get("checkpoint_storage")
    return tree if storage is None else {**tree, "checkpoint_storage": {**storage, **counts}}


def _apply(change: Change) -> str:
    """Write the new policy, delete the checkpoints that it does not keep, and return a sentence for the user."""
    experiment = change.experiment
    if change.points:
        write_secrets(experiment.points, change.points, [masked(point) for point in change.points])
    write_effective(experiment, change.config)
    write_config(experiment, change.config, change.origins)
    for storage, checkpoint in change.gone:
        storage.remove(checkpoint.uuid)
    if change.has_ended:
        return f"Experiment {experiment.id}: {count(len(change.gone), 'checkpoint')} deleted"
    return f"Experiment {experiment.id}: has not ended; its trials apply the new policy from their next checkpoints on"


labels_argument = click.argument("labels", metavar="LABEL...", nargs=-1, required=True, type=words)


@click.group(cls=Group)
def label() -> None:
    """Add labels to experiments or remove them."""


@label.command()
@experiments_argument
@labels_argument
def add(experiments: list[ExperimentFolder], labels: tuple[str, ...]) -> None:
    """Add labels to experiments.

    \b
    Example:
      hpc-det experiment label add 12 baseline paper
    """
    each(experiments, lambda experiment: add_labels(experiment, labels))


@label.command()
@experiments_argument
@labels_argument
def remove(experiments: list[ExperimentFolder], labels: tuple[str, ...]) -> None:
    """Remove labels from experiments.

    \b
    Example:
      hpc-det experiment label remove 12 digits
    """
    each(experiments, lambda experiment: remove_labels(experiment, labels))


def add_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    """Add the labels that the experiment does not have; return a sentence with all of its labels."""
    known = ExperimentView(experiment).about().labels
    return _set_labels(experiment, [*known, *(label for label in dict.fromkeys(labels) if label not in known)])


def remove_labels(experiment: ExperimentFolder, labels: Sequence[str]) -> str:
    """Remove the labels; return a sentence with the remaining ones. Raises UsageError for labels it does not have."""
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
