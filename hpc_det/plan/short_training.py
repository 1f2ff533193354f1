"""The configuration of a short training of an experiment: one trial of a few batches, without hooks and loggers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, get_args

from hpc_det.config.fields import Device
from hpc_det.config.merge import Tree
from hpc_det.config.trial_code import script_without_loop, script_without_trainer
from hpc_det.plan.effective import Effective
from hpc_det.search.sample import is_nested, kind_of


def short_training(experiment: Tree, *, title: str, label: str, batches: int, reports: int, variable: str) -> Tree:
    """Return the configuration of a short training, from an effective configuration.

    `reports`: number of training reports. `variable`: NAME=VALUE for the environment of the ranks.
    """
    tree = deepcopy(experiment)
    tree["name"] = f"{tree['name']}: {title}"
    tree["labels"] = [*(each for each in tree["labels"] if each != label), label]
    tree["notify"], tree["loggers"] = [], []
    tree["searcher"] = _single(tree["searcher"], batches)
    tree["scheduling_unit"] = max(batches // reports, 1)
    tree["max_restarts"] = 0
    _add_variable(tree["environment"], variable)
    return tree


def problems(found: Effective, *, scripts: bool = False) -> Iterator[str]:
    """Yield each reason why the experiment cannot have a short training. `scripts`: allow scripts on hpc_det.core."""
    if scripts:
        if script := script_without_loop(found.tree["entrypoint"], found.context):
            yield (
                f"entrypoint: {script}, with what it imports from the code directory, imports neither hpc_det.core nor "
                f"hpc_det.pytorch, so it can be neither stopped nor compared; use hpc_det.core in its loop; where an "
                f"installed package uses it, import hpc_det.core in the script, too"
            )
    elif script := script_without_trainer(found.tree["entrypoint"], found.context):
        yield (
            f"entrypoint: {script}, with what it imports from the code directory, never imports hpc_det.pytorch, so "
            f"the length of its training cannot be set; give a trial class, as in `--trial module:Class`, or a script "
            f"with the Trainer; where an installed package makes the Trainer, import hpc_det.pytorch in the script, too"
        )
    yield from _ranges(found.tree["hyperparameters"])


def _ranges(space: Tree, path: str = "hyperparameters") -> Iterator[str]:
    """Yield a problem for each hyperparameter that has no single value."""
    for name, spec in space.items():
        if is_nested(spec):
            yield from _ranges(spec, f"{path}.{name}")
        elif (kind := kind_of(spec)) != "const":
            yield (
                f"{path}.{name}: {kind} is a range to search, but this is one training; give a value with "
                f"--config {path}.{name}=VALUE"
            )


def _single(searcher: Tree, batches: int) -> Tree:
    """Return a searcher with one trial of this length, which starts from the same weights."""
    common = ("metric", "smaller_is_better", "source_trial_id", "source_checkpoint_uuid")
    return {"name": "single", "max_length": {"batches": batches}, **{key: searcher.get(key) for key in common}}


def _add_variable(environment: dict[str, Any], variable: str) -> None:
    """Add a variable. Variables may be grouped by slot type, with types missing."""
    variables = environment["environment_variables"]
    if isinstance(variables, list):
        variables.append(variable)
    else:
        variables |= {device: [*variables.get(device, []), variable] for device in get_args(Device)}
