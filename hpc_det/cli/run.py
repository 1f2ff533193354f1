"""hpc-det run: create an experiment from a Hydra command line."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from hpc_det.cli.arguments import Choices, choices_options, include_option


@click.command()
@click.argument("overrides", metavar="[HYDRA OVERRIDES]...", nargs=-1, type=click.UNPROCESSED)
@include_option
@choices_options
@click.option("-m", "--multirun", is_flag=True, help="Create one experiment with a trial for each point of a sweep.")
def run(overrides: tuple[str, ...], includes: tuple[Path, ...], choices: Choices, multirun: bool) -> None:
    """Create an experiment from a Hydra command line.

    The overrides have Hydra's syntax and apply to conf/config.yaml: `KEY=VALUE` sets a key, `+KEY=VALUE` adds one,
    `~KEY` removes one, and `cluster=`, `template=` and `experiment=` select a file of that group. Your own files in
    $HPC_DET_ROOT/conf take precedence.

    With --multirun an override may have several values in Hydra's grammar: `KEY=A,B`, `KEY=range(1,5)` or
    `GROUP=glob(*)`. The points are all combinations, and the last override varies fastest. All trials run in the same
    kind of job, so they may differ in hyperparameters and other training settings, but not in resources.

    \b
    Example:
      hpc-det run experiment=digits cluster=slurm template=small resources.slots_per_trial=8
      hpc-det run -m experiment=digits hyperparameters.learning_rate=0.1,0.01 --dry-run
    """
    from hpc_det.config.request import with_includes

    add_includes = partial(with_includes, paths=includes)
    if multirun:
        from hpc_det.cli.experiment.create import submit_or_show_multirun
        from hpc_det.plan.multirun import multirun_from_hydra

        points = multirun_from_hydra(overrides, os.environ)
        submit_or_show_multirun(points.with_requests(add_includes), choices)
        return
    from hpc_det.cli.experiment.create import submit_or_show
    from hpc_det.config.cluster_choice import LOCAL
    from hpc_det.config.request import from_hydra

    submit_or_show(add_includes(from_hydra(overrides, os.environ, LOCAL if choices.local else None)), choices)
