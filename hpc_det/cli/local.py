"""experiment create --local: the trial in this process, for a look or a debugger."""

from __future__ import annotations

import os

import click

from hpc_det import compat
from hpc_det.config.effective import Effective
from hpc_det.config.entrypoint import trial_name
from hpc_det.errors import UsageError
from hpc_det.search.single import trial_seed


def run_here(found: Effective, *, test: bool, debug: bool) -> None:
    """Raises UsageError for an entrypoint that names no trial."""
    name = trial_name(found.tree["entrypoint"])
    if name is None:
        raise UsageError(
            f"--local: the entrypoint {found.tree['entrypoint']!r} names no trial to run in this process; use one with "
            f"`--trial module:Class`, or start the script by itself"
        )
    from hpc_det.pytorch.local import run_locally  # loads torch

    variables = found.experiment.environment.variables(found.cluster.slot_type)
    for key, _, value in (variable.partition("=") for variable in variables):
        os.environ[key] = value
    if compat.is_on(os.environ):
        compat.install()
    seed = found.tree["reproducibility"]["experiment_seed"] or 0
    spec = {
        "experiment_id": 0,
        "trial_id": 0,
        "trial_seed": trial_seed(seed, 1),
        "hparams": found.experiment.hparams,
        "config": found.tree,
    }
    folder = run_locally(name, spec, found.context_dir, test=test, debug=debug)
    if test:
        click.echo("One batch was trained, validated and saved.")
    else:
        click.echo(f"Trained. Checkpoints and metrics: {folder}")
