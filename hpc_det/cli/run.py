"""hpc-det run: an experiment from a Hydra command line."""

from __future__ import annotations

import os

import click

from hpc_det.cli.parameters import Choices, choices_options
from hpc_det.errors import UsageError


@click.command()
@click.argument("overrides", metavar="[HYDRA OVERRIDES]...", nargs=-1, type=click.UNPROCESSED)
@choices_options
@click.option("-m", "--multirun", is_flag=True, hidden=True)
def run(overrides: tuple[str, ...], choices: Choices, multirun: bool) -> None:
    """Create an experiment from a Hydra command line.

    The overrides are Hydra's, on conf/config.yaml: `KEY=VALUE` sets a key, `+KEY=VALUE` adds one, `~KEY` removes one,
    and `cluster=`, `template=` and `experiment=` choose a file of that group, your own in $HPC_DET_ROOT/conf first.

    \b
    Example:
      hpc-det run experiment=digits cluster=slurm template=small resources.slots_per_trial=8
    """
    if multirun:
        raise UsageError("--multirun: not in this version; start `hpc-det run` once for each experiment")
    from hpc_det.cli.create import submit_or_show
    from hpc_det.config.request import from_hydra

    submit_or_show(from_hydra(overrides, os.environ), choices)
