"""hpc-det experiment set gc-policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from hpc_det.checkpoint.collect import Superfluous, superfluous_in
from hpc_det.checkpoint.policy import policies_of
from hpc_det.cli.confirm import confirm
from hpc_det.cli.several import at_once, each
from hpc_det.config.merge import Tree
from hpc_det.config.secrets import masked
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, read_map
from hpc_det.store.experiment_config import write_secrets
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.submission import write_config, write_effective
from hpc_det.view.checkpoints import effective_config
from hpc_det.view.ended import beginning_with
from hpc_det.view.formatting import count, size
from hpc_det.view.state import ExperimentView
from hpc_det.view.watch import say, states


@dataclass(frozen=True)
class Change:
    """Of one experiment."""

    experiment: ExperimentFolder
    config: Tree
    """The effective one, with the new policy."""
    points: list[Tree]
    origins: dict[str, str]
    has_ended: bool
    gone: list[Superfluous]
    """What the new policy does not keep, where it has ended."""


def set_policy(experiments: Sequence[ExperimentFolder], counts: Mapping[str, int], *, yes: bool) -> None:
    """`counts`: of `checkpoint_storage.save_*`, those that change. Raises UsageError where there is none."""
    if not counts:
        raise UsageError(
            "set gc-policy: give at least one of --save-experiment-best, --save-trial-best and --save-trial-latest"
        )
    ended = {number: state.is_final for number, state in states(map(ExperimentView, experiments)).items()}
    changes = at_once(experiments, lambda experiment: _change(experiment, counts, has_ended=ended[experiment.id]))
    gone = [found for change in changes for found in change.gone]
    if gone:
        total = size(sum(found.checkpoint.size_bytes for found in gone))
        click.echo("\n".join(map(_in_words, gone)))
        for warning in beginning_with([found.checkpoint.path for found in gone], experiments[0].root()):
            say(f"warning: {warning}")
        confirm(f"Delete {count(len(gone), 'checkpoint')} ({total}) for good?", yes=yes)
    each(changes, _apply)


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
    """A point of a multirun may have a policy of its own."""
    storage = tree.get("checkpoint_storage")
    return tree if storage is None else {**tree, "checkpoint_storage": {**storage, **counts}}


def _apply(change: Change) -> str:
    experiment = change.experiment
    if change.points:
        write_secrets(experiment.points, change.points, [masked(point) for point in change.points])
    write_effective(experiment, change.config)
    write_config(experiment, change.config, change.origins)
    for storage, checkpoint in change.gone:
        storage.remove(checkpoint.uuid)
    if change.has_ended:
        return f"Experiment {experiment.id}: {count(len(change.gone), 'checkpoint')} deleted"
    return f"Experiment {experiment.id}: has not ended; its trials keep to the policy from their next checkpoints on"
