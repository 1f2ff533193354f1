"""hpc-det experiment continue, fork and activate: train an experiment further, again, or after a pause."""

from __future__ import annotations

from functools import partial

import click

from hpc_det.cli.arguments import (
    Choices,
    any_experiment_argument,
    choices_options,
    completed_names,
    experiment_argument,
    experiments_argument,
)
from hpc_det.cli.experiment.create import as_chosen, carry_out, show_training
from hpc_det.cli.output import each
from hpc_det.client.continuation import activate_one, continue_one, forked
from hpc_det.errors import count
from hpc_det.store.folders import ExperimentFolder


@click.command("continue")
@experiment_argument
@click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key; repeatable.")
@click.option("-f", "--follow", is_flag=True, help="Show the training until it ends.")
def continue_(experiment: ExperimentFolder, overrides: tuple[str, ...], follow: bool) -> None:
    """Continue an experiment that was cancelled, has failed, or should train longer.

    Trials resume from their newest checkpoints. Hyperparameters, the seed and the entrypoint cannot be changed.

    \b
    Example:
      hpc-det experiment continue 12 --config searcher.max_length.epochs=40
    """
    trials = continue_one(experiment, overrides)
    click.echo(f"Continued experiment {experiment.id}: {count(trials, 'trial')}")
    if follow:
        show_training(experiment)


@click.command()
@any_experiment_argument
@click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key; repeatable.")
@click.option("--cluster", metavar="NAME", shell_complete=completed_names("cluster"), help="Another cluster profile.")
@choices_options
def fork(experiment: ExperimentFolder, overrides: tuple[str, ...], cluster: str | None, choices: Choices) -> None:
    """Run an experiment again as a new experiment.

    The new experiment has the configuration, seed and code with which the first one was created, so it trains the same
    trials. On CPUs the results are equal bit for bit. An experiment that a colleague shares is forked as ada:12,
    without ada's secrets.

    \b
    Example:
      hpc-det experiment fork 12 --config hyperparameters.dropout=0.5
    """
    carry_out(forked(experiment, overrides, cluster, partial(as_chosen, choices=choices)), choices)


@click.command()
@experiments_argument
def activate(experiments: list[ExperimentFolder]) -> None:
    """Resume paused experiments.

    \b
    Example:
      hpc-det experiment activate 14
    """
    each(experiments, activate_one)
