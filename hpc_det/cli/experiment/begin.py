"""hpc-det experiment: create one, or begin again with one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.ids import any_experiment_argument, experiment_argument
from hpc_det.cli.parameters import Choices, choices_options, completed_names, request_options
from hpc_det.store.folders import ExperimentFolder

if TYPE_CHECKING:
    from hpc_det.config.request import Request


@experiment.command()
@request_options
@choices_options
def create(request: Request, choices: Choices) -> None:
    """Create an experiment from a YAML file and the folder of its code.

    CONTEXT_DIR is copied for the job, without what its .detignore names; by default the `context_dir` of CONFIG, or
    the current directory. What --include names lies beside it there, under its own name.

    Without --follow the last line is `Created experiment N`. A dry run's output is the script; --explain adds comment
    lines. --local trains in this process, on the folder itself: with --test it shows in seconds whether everything fits
    together, with --pdb it stops in the debugger where it does not.

    \b
    Example:
      hpc-det experiment create digits.yaml . --cluster slurm --template small \\
          --config resources.slots_per_trial=8
    """
    from hpc_det.cli.create import submit_or_show

    submit_or_show(request, choices)


@experiment.command("continue")
@experiment_argument
@click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key; repeatable.")
@click.option("-f", "--follow", is_flag=True, help="Show the training until it ends.")
def continue_(experiment: ExperimentFolder, overrides: tuple[str, ...], follow: bool) -> None:
    """Go on with an experiment that was cancelled, has failed, or shall train longer.

    Trials go on from their newest checkpoints. Hyperparameters, the seed and the entrypoint stay what they are.

    \b
    Example:
      hpc-det experiment continue 12 --config searcher.max_length.epochs=40
    """
    from hpc_det.cli import again

    again.continue_(experiment, overrides, follow=follow)


@experiment.command()
@any_experiment_argument
@click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key; repeatable.")
@click.option("--cluster", metavar="NAME", shell_complete=completed_names("cluster"), help="Another cluster profile.")
@choices_options
def fork(experiment: ExperimentFolder, overrides: tuple[str, ...], cluster: str | None, choices: Choices) -> None:
    """Run an experiment again, as another one.

    Configuration, seed and code are those that the experiment was created with, so the same trials come. On CPUs they
    come to the same bits. What a colleague shares is forked as ada:12, without ada's secrets.

    \b
    Example:
      hpc-det experiment fork 12 --config hyperparameters.dropout=0.5
    """
    from hpc_det.cli import again

    again.fork(experiment, overrides, cluster, choices)
