"""hpc-det trial: one trial of an experiment."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_det.cli.experiment.keep import output_dir
from hpc_det.cli.group import Group
from hpc_det.cli.ids import any_trial_argument, trial_argument
from hpc_det.cli.log_choices import LogChoices, log_options
from hpc_det.cli.output import Output, output_options
from hpc_det.store.folders import TrialFolder


@click.group(cls=Group)
def trial() -> None:
    """Look at one trial of an experiment."""


@trial.command()
@any_trial_argument
@click.option("--metrics", "with_metrics", is_flag=True, help="Every report of its metrics, and nothing else.")
@output_options
def describe(trial: TrialFolder, with_metrics: bool, output: Output) -> None:
    """Describe a trial: its state, hyperparameters, attempts, metrics and checkpoints.

    The state is QUEUED, RUNNING, PAUSED, COMPLETED, ERROR, INVALID or CANCELED. PAUSED: the searcher may want
    more of it; INVALID: it said that its hyperparameters cannot work.

    \b
    Example:
      hpc-det trial describe 12/7 --metrics
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
    from hpc_det.cli.trial_metrics import COLUMNS, KEYS, reported

    if with_metrics:
        output.table(reported(trial), COLUMNS, KEYS)
        return
    found = of(trial)
    if output.is_for_people:
        click.echo(in_words(found))
    else:
        output.details([found.as_json()])


@trial.command("list-checkpoints")
@any_trial_argument
@click.option("--best", type=click.IntRange(min=1), metavar="N", help="Only the best N, by the searcher's metric.")
@output_options
def list_checkpoints(trial: TrialFolder, best: int | None, output: Output) -> None:
    """List the checkpoints of a trial, the newest first.

    \b
    Example:
      hpc-det trial list-checkpoints 12/7
    """
    from hpc_det.cli.checkpoint_records import COLUMNS, KEYS, listed_of_trial

    output.table(listed_of_trial(trial, best), COLUMNS, KEYS)


@trial.command()
@any_trial_argument
@output_dir
@click.option("--best", is_flag=True, help="The one with the best validation, by the searcher's metric.")
@click.option("--latest", is_flag=True, help="The newest one; this is the default.")
@click.option("--uuid", metavar="UUID", help="This one.")
def download(trial: TrialFolder, target: Path, best: bool, latest: bool, uuid: str | None) -> None:
    """Copy a checkpoint of a trial, and print its folder.

    Every byte is compared with the checksums of the manifest, and nothing is overwritten.

    \b
    Example:
      hpc-det trial download 12/7 --best -o best
    """
    from hpc_det.cli.download import download as copy
    from hpc_det.cli.download import of_one_trial

    if best + latest + (uuid is not None) > 1:
        raise click.UsageError("give only one of --best, --latest and --uuid")
    copy([of_one_trial(trial, uuid, best=best)], target)


@trial.command()
@trial_argument
def kill(trial: TrialFolder) -> None:
    """End one trial now, without another checkpoint. The other trials of its experiment go on.

    \b
    Example:
      hpc-det trial kill 13/1
    """
    from hpc_det.cli import control

    click.echo(control.kill_trial(trial))


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
