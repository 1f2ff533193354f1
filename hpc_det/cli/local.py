"""experiment create --local: the trial in this process, for a look or a debugger."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import click

from hpc_det import compat
from hpc_det.config.entrypoint import trial_name
from hpc_det.config.rank_variables import asks_for_compat
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective
from hpc_det.search.sample import first_sample
from hpc_det.store.experiments import ExperimentStore, state_root
from hpc_det.submit.source import source_checkpoint


def run_here(found: Effective, *, test: bool, debug: bool) -> None:
    """Raises UsageError for an entrypoint that names no trial."""
    name = trial_name(found.tree["entrypoint"])
    if name is None:
        raise UsageError(
            f"--local: the entrypoint {found.tree['entrypoint']!r} names no trial to run in this process; use one with "
            f"`--trial module:Class`, or start the script by itself"
        )
    _set_environment(found)
    gc.disable()  # what an import makes stays, see hpc_det.launch.rank
    from hpc_det.pytorch.loop.local import run_locally  # loads torch, which reads the environment

    gc.freeze()
    gc.enable()
    outcome = run_locally(name, _spec(found), found.context_dir, test=test, debug=debug)
    if test and outcome["kind"] == "finished":
        click.echo("One batch was trained, validated and saved.")
    else:
        click.echo(f"{outcome['kind'].capitalize()} at batch {outcome['steps']}.")


def _set_environment(found: Effective) -> None:
    """As the ranks of a job have it."""
    variables = found.experiment.environment.variables(found.cluster.slot_type)
    values = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
    os.environ.update(values)
    # Python has read its own before, at its start.
    folders = filter(None, values.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(found.context_dir / folder) for folder in folders]
    if found.cluster.slot_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if asks_for_compat(os.environ):
        compat.install()


def _spec(found: Effective) -> dict[str, Any]:
    """Of the first trial that the experiment would have."""
    sample = first_sample(found.tree["hyperparameters"], found.tree["reproducibility"]["experiment_seed"] or 0)
    spec = {
        "experiment_id": 0,
        "trial_id": 0,
        "trial_seed": sample.seed,
        "hparams": sample.hparams,
        "config": found.tree,
    }
    source = source_checkpoint(found.tree["searcher"], ExperimentStore(state_root(os.environ)))
    return {**spec, "warm_start": str(source)} if source else spec
