"""hpc-det trial: one trial of an experiment."""

from __future__ import annotations

import click

from hpc_det.cli.group import Group
from hpc_det.cli.log_choices import LogChoices, log_options
from hpc_det.cli.output import Output, output_options
from hpc_det.cli.parameters import any_trial_argument
from hpc_det.store.folders import TrialFolder


@click.group(cls=Group)
def trial() -> None:
    """Look at one trial of an experiment."""


@trial.command()
@any_trial_argument
@output_options
def describe(trial: TrialFolder, output: Output) -> None:
    """Describe a trial: its state, hyperparameters, attempts, metrics and checkpoints.

    The state is QUEUED, RUNNING, PAUSED, COMPLETED, ERROR, INVALID or CANCELED. PAUSED: the searcher may want
    more of it; INVALID: it said that its hyperparameters cannot work.

    \b
    Example:
      hpc-det trial describe 12/7 --json
      {"id": 7, "state": "PAUSED", "worker": null, "job_id": "4711_3",
       "hyperparameters": {"lr": 0.01}, "seed": 1729,
       "batches": 100, "total_batches": 100,
       "training": {"loss": 0.1}, "validation": {"accuracy": 0.96},
       "best": {...}, "checkpoints": [...], "attempts": [...]}
    `worker` is who trains it now. What the last keys hold stands in
    `hpc-det experiment describe --help`.
    """
    from hpc_det.cli.describe_trial import in_words, of

    found = of(trial)
    if output.is_for_people:
        click.echo(in_words(found))
    else:
        output.details([found.as_json()])


@trial.command()
@any_trial_argument
@log_options
def logs(trial: TrialFolder, choices: LogChoices) -> None:
    """Print what the ranks of a trial and its attempts printed, merged by time.

    More stands in `hpc-det experiment logs --help`.

    \b
    Example:
      hpc-det trial logs 12/7 --follow --rank 0
      hpc-det trial logs 12/7 --tail 100 --timestamps
    """
    from hpc_det.cli.logs import print_trial

    print_trial(trial, choices)
