"""hpc-det experiment: what there is, and how far it is."""

from __future__ import annotations

import click

from hpc_det.cli.experiment.group import experiment
from hpc_det.cli.ids import any_experiment_argument, any_experiments_argument, created_trial, store
from hpc_det.cli.log_choices import LogChoices, log_options
from hpc_det.cli.output import Output, output_options, show
from hpc_det.store.folders import ExperimentFolder

STATES = ("SUBMITTING", "QUEUED", "RUNNING", "SUSPENDED", "PAUSED", "COMPLETED", "ERROR", "CANCELED")


@experiment.command("list")
@click.option("--of", "owner", metavar="OWNER", help="Those that a colleague shares: a user, or their HPC_DET_ROOT.")
@click.option("-a", "--all", "with_archived", is_flag=True, help="Archived ones, too.")
@click.option("--state", "wanted", multiple=True, type=click.Choice(STATES), help="Only these; repeatable.")
@click.option("--label", "labels", multiple=True, metavar="LABEL", help="Only those that have it; repeatable.")
@output_options
def list_(
    owner: str | None, with_archived: bool, wanted: tuple[str, ...], labels: tuple[str, ...], output: Output
) -> None:
    """List experiments.

    The state is SUBMITTING, QUEUED, RUNNING, SUSPENDED, PAUSED, COMPLETED,
    ERROR or CANCELED.

    \b
    Example:
      hpc-det experiment list --json
      [{"id": 12, "name": "digits", "description": "",
        "labels": ["baseline"], "archived": false, "state": "RUNNING",
        "batches": 200, "total_batches": 460,
        "best": {"metric": "accuracy", "value": 0.97,
                 "batches": 180, "trial": 1},
        "trials": {"expected": 1, "created": 1, "running": 1,
                   "completed": 0, "failed": 0, "invalid": 0},
        "progress": 0.43,
        "submitted": "2026-11-20T10:02:05+01:00"}]
    `total_batches` and `best` are null before the first report, and `batches`
    and `total_batches` where there are several trials; `best` is then by what
    the trials told the search. A metric is a number or one of "NaN",
    "Infinity", "-Infinity".
    """
    from hpc_det.cli.listing import COLUMNS, KEYS, listed

    records = (
        record
        for record in listed(store(owner))
        if (with_archived or not record["archived"])
        and (not wanted or record["state"] in wanted)
        and set(labels) <= set(record["labels"])
    )
    output.table(list(records), COLUMNS, KEYS)


@experiment.command()
@any_experiments_argument
@output_options
def describe(experiments: list[ExperimentFolder], output: Output) -> None:
    """Describe experiments: state and trials, or attempts, metrics and checkpoints of the only trial.

    \b
    Example:
      hpc-det experiment describe 12 --json
      {"id": 12, "name": "digits", "state": "RUNNING", "why": null,
       "code": {"commit": "1a2b3c4...", "branch": "main", "dirty": true,
                "remote": "git@example.org:me/digits.git"},
       "folder": "/home/me/hpc_det/experiments/12",
       "owner": "me", "shared_with": null, "entrypoint": "...",
       "searcher": {"name": "single", "metric": "accuracy", ...},
       "slots": 8, "nodes": 2, "ranks_per_node": 4,
       "scheduler": "slurm", "job_id": "4711", "job_ids": ["4711"],
       "submitted": "2026-11-20T10:02:05+01:00",
       "trial_counts": {"expected": 1, "created": 1, "running": 1,
                        "completed": 0, "failed": 0, "invalid": 0},
       "batches": 200, "total_batches": 460,
       "best": {"metric": "accuracy", "value": 0.97,
                "batches": 180, "trial": 1}, "progress": 0.43,
       "training": {"loss": 0.1}, "validation": {"accuracy": 0.96},
       "checkpoints": [{"uuid": "...", "batches": 180, "complete": true,
                        "time": "2026-11-20T10:05:00+01:00"}],
       "set_aside": [],
       "attempts": [{"number": 1, "job_id": "4711", "host": "node1",
                     "started": "...", "ended": "...",
                     "cause": "preempted", "batches": 120,
                     "action": "requeue", "why": "preempted",
                     "failure": null, "problems": []}],
       "trials": [...]}
    Each of `trials` is what `hpc-det trial describe` prints. Of several trials,
    `training` and `validation` are null here, and `checkpoints` and `attempts`
    empty. `code` is null where git knew nothing of it. `why` says in a sentence
    what ended an ERROR or CANCELED experiment.
    `complete`: every file is there in its size. Of an open attempt, all from
    `ended` on is null. `cause` is finished, failed, preempted, time limit,
    node lost, unhealthy node, scheduler away, disk full, hung, cancelled, paused,
    waiting (for the searcher) or resume check; `action` done, restart, requeue, give up, pause or wait.
    """
    from hpc_det.cli.describe import described, in_words

    if output.is_for_people:
        show("\n\n".join(in_words(experiment) for experiment in experiments))
    else:
        output.details([described(experiment) for experiment in experiments])


@experiment.command()
@any_experiment_argument
@click.option("--trial", type=int, metavar="T", help="Only the lines of this trial.")
@log_options
def logs(experiment: ExperimentFolder, trial: int | None, choices: LogChoices) -> None:
    """Print what the jobs and their ranks printed, attempt after attempt, merged by time.

    The lines of a rank begin with [rank=R], those of a job outside of any attempt with [job=J], and of several trials
    each one's with [trial=T]; one trial comes after the other, but for --tail and what is followed. With --follow, a
    requeued job that the scheduler holds back is released.

    A level is recognised from the usual ways to print one. A line that names none belongs to the one above it, or is
    INFO where it was printed later.

    \b
    Example:
      hpc-det experiment logs 12 --follow --rank 0
      hpc-det experiment logs 12 --since 2h --level WARNING
      hpc-det experiment logs 12 --tail 1 --json
      {"time": "2026-11-20T10:02:09+01:00", "trial": 1, "attempt": 1,
       "rank": 0, "job": null, "level": "INFO", "line": "epoch 3"}
    `job`: outside of any attempt, the name of the job's log.
    """
    from hpc_det.cli.logs import print_experiment, print_trial

    if trial is None:
        print_experiment(experiment, choices)
    else:
        print_trial(created_trial(experiment, trial), choices)


@experiment.command("list-trials")
@any_experiment_argument
@output_options
def list_trials(experiment: ExperimentFolder, output: Output) -> None:
    """List the trials of an experiment, with the hyperparameters in which they differ.

    \b
    Example:
      hpc-det experiment list-trials 12 --csv
    """
    from hpc_det.cli.trials import KEYS, listed

    output.table(*listed(experiment), KEYS)


@experiment.command()
@any_experiment_argument
@click.option("--origins", is_flag=True, help="For people: who wrote each key, too.")
@output_options
def config(experiment: ExperimentFolder, origins: bool, output: Output) -> None:
    """Print the effective configuration of an experiment, secrets masked.

    Name, description and labels are those of now; all else is what its jobs go by.

    \b
    Example:
      hpc-det experiment config 12 --origins
    """
    from hpc_det.cli.origins import explained
    from hpc_det.config.plain_yaml import dump_yaml
    from hpc_det.view.config import shown_config

    tree, written_by = shown_config(experiment)
    if not output.is_for_people:
        output.details([tree])
    elif origins:
        show("\n".join(explained(tree, written_by)))
    else:
        click.echo(dump_yaml(tree), nl=False)
