"""hpc-det experiment continue, fork and activate: train an experiment further, again, or after a pause."""

from __future__ import annotations

import os
import time
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
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.config.request import find
from hpc_det.errors import UsageError
from hpc_det.schedulers.shared_answers import ASK_S
from hpc_det.store.experiment_config import write_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.again import go_on, stored, submit_again
from hpc_det.view.formatting import count
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import state


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
    view = ExperimentView(experiment)
    if not (found := state(view)).is_final:
        raise UsageError(
            f"experiment {experiment.id} is {found.value}; wait for its end, or end it with "
            f"`hpc-det experiment kill {experiment.id}`"
        )
    trials = go_on(experiment, overrides)
    if view.about().archived:  # otherwise listings would hide a running experiment
        write_about(experiment, archived=False)
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
    if experiment.sweep.exists():
        raise UsageError(
            f"experiment {experiment.id}: is a sweep of a Hydra app, which only the app can start; start the app "
            f"again, or repeat only what failed with `hpc-det experiment continue {experiment.id}`"
        )
    profile = load_yaml(find("cluster", cluster, os.environ)) if cluster else None
    carry_out(stored(experiment, overrides, profile, change=partial(as_chosen, choices=choices)), choices)


@click.command()
@experiments_argument
def activate(experiments: list[ExperimentFolder]) -> None:
    """Resume paused experiments.

    \b
    Example:
      hpc-det experiment activate 14
    """
    each(experiments, activate_one)


LEAVE_S = 60.0  # seconds that `activate` waits for trials that are still saving


def activate_one(experiment: ExperimentFolder) -> str:
    """Resume a paused experiment and return a sentence for the user.

    Raises UsageError if the experiment is not paused, or if its trials are still saving after LEAVE_S seconds.
    """
    view = ExperimentView(experiment)
    end = time.monotonic() + LEAVE_S
    while (found := state(view)) is not ExperimentState.PAUSED:
        if not view.search.paused or found.is_final:
            other = (
                f"continue this one with `hpc-det experiment continue {experiment.id}`"
                if found.is_final
                else f"watch this one with `hpc-det experiment logs -f {experiment.id}`"
            )
            raise UsageError(
                f"experiment {experiment.id} is {found.value}; only a paused experiment can be activated; {other}"
            )
        if time.monotonic() > end:
            raise UsageError(
                f"experiment {experiment.id} is still {found.value}: its trials are saving; try again later"
            )
        time.sleep(ASK_S)
    trials = submit_again(experiment)
    return f"Activated experiment {experiment.id}: {count(trials, 'trial')}"
