"""hpc-det experiment: create experiments and look after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_det.cli.parameters import (
    Choices,
    choices_options,
    created_trial,
    experiment_argument,
    request_options,
    store,
)
from hpc_det.store.folders import ExperimentFolder

if TYPE_CHECKING:
    from hpc_det.config.request import Request


@click.group()
def experiment() -> None:
    """Create experiments and look after them."""


@experiment.command()
@request_options
@choices_options
def create(config: Path, request: Request, choices: Choices) -> None:
    """Create an experiment from a YAML file and the folder of its code.

    CONTEXT_DIR is copied for the job, without what its .detignore names; by default the `context_dir` of CONFIG, or
    the current directory. Without --follow the last line is `Created experiment N`. A dry run's output is the script;
    --explain adds comment lines. --local trains in this process, on the folder itself: with --test it shows in seconds
    whether everything fits together, with --pdb it stops in the debugger where it does not.

    \b
    Example:
      hpc-det experiment create digits.yaml . --cluster slurm --template small \\
          --config resources.slots_per_trial=8 --follow
    """
    from hpc_det.cli.create import submit_or_show

    submit_or_show(request, choices)


@experiment.command("list")
@click.option("--json", "as_json", is_flag=True, help="A JSON list, one record for each experiment.")
def list_(as_json: bool) -> None:
    """List all experiments.

    The state is QUEUED, RUNNING, COMPLETED, ERROR or CANCELED.

    \b
    Example:
      hpc-det experiment list --json
      [{"id": 12, "name": "digits", "state": "RUNNING",
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
    from hpc_det.cli.listing import listed, table

    records = listed(list(store().all()))
    click.echo(json.dumps(records, indent=1) if as_json else table(records))


@experiment.command()
@experiment_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON record.")
def describe(experiment: ExperimentFolder, as_json: bool) -> None:
    """Describe an experiment: its state, and its trials, or the attempts, metrics and checkpoints of the only one.

    \b
    Example:
      hpc-det experiment describe 12 --json
      {"id": 12, "name": "digits", "state": "RUNNING", "why": null,
       "folder": "/home/me/hpc_det/experiments/12", "entrypoint": "...",
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
       "attempts": [{"number": 1, "job_id": "4711", "host": "node1",
                     "started": "...", "ended": "...",
                     "cause": "preempted", "batches": 120,
                     "action": "requeue", "why": "preempted",
                     "failure": null, "problems": []}],
       "trials": [...]}
    Each of `trials` is what `hpc-det trial describe` prints. Of several trials,
    `training` and `validation` are null here, and `checkpoints` and `attempts`
    empty. `why` says in a sentence what ended an ERROR or CANCELED experiment.
    `complete`: every file is there in its size. Of an open attempt, all from
    `ended` on is null. `cause` is finished, failed, preempted, time limit,
    node lost, unhealthy node, hung, cancelled, paused or waiting (for the
    searcher); `action` done, restart, requeue, give up, pause or wait.
    """
    from hpc_det.cli.describe import described, in_words

    click.echo(json.dumps(described(experiment), indent=1) if as_json else in_words(experiment))


@experiment.command()
@experiment_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the experiment has ended, across requeues.")
@click.option("--trial", type=int, metavar="T", help="Only the lines of this trial.")
@click.option("--rank", type=int, metavar="R", help="Only the lines of this rank.")
def logs(experiment: ExperimentFolder, follow: bool, trial: int | None, rank: int | None) -> None:
    """Print what the jobs and their ranks printed, attempt after attempt.

    The lines of a rank begin with [rank=R], those of a job outside of any attempt with [job=J], and of several trials
    each one's with [trial=T]. With --follow, a requeued job that the scheduler holds back is released.

    \b
    Example:
      hpc-det experiment logs 12 --follow --rank 0
    """
    from hpc_det.cli.logs import stream, stream_trial

    if trial is None:
        lines = stream(experiment, follow=follow, rank=rank)
    else:
        lines = stream_trial(created_trial(experiment, trial), follow=follow, rank=rank)
    for line in lines:
        click.echo(line)


@experiment.command()
@experiment_argument
@click.option("--poll", type=click.FloatRange(min=0.05, max=3600), default=1.0, show_default=True, metavar="SECONDS")
def wait(experiment: ExperimentFolder, poll: float) -> None:
    """Wait until an experiment has ended; exit code 0 only if it is COMPLETED.

    Otherwise a sentence on stderr says why. A requeued job that the scheduler holds back is released.

    \b
    Example:
      hpc-det experiment wait 12 && echo trained
    """
    from hpc_det.view.watch import Watch, insist_on_completion

    watch = Watch(experiment)
    insist_on_completion(watch.view, watch.wait(poll))


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
@experiment_argument
@click.option("--config", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key; repeatable.")
@click.option("--cluster", metavar="NAME", help="Another cluster profile.")
@choices_options
def fork(experiment: ExperimentFolder, overrides: tuple[str, ...], cluster: str | None, choices: Choices) -> None:
    """Run an experiment again, as another one.

    Configuration, seed and code are those that the experiment was created with, so the same trials come. On CPUs they
    come to the same bits.

    \b
    Example:
      hpc-det experiment fork 12 --config hyperparameters.dropout=0.5
    """
    from hpc_det.cli import again

    again.fork(experiment, overrides, cluster, choices)


@experiment.command()
@experiment_argument
def pause(experiment: ExperimentFolder) -> None:
    """Have the trials of an experiment save, and free their nodes until `activate`.

    \b
    Example:
      hpc-det experiment pause 12
    """
    from hpc_det.cli import control

    click.echo(control.pause(experiment))


@experiment.command()
@experiment_argument
def activate(experiment: ExperimentFolder) -> None:
    """Go on with an experiment that was paused.

    \b
    Example:
      hpc-det experiment activate 12
    """
    from hpc_det.cli import again

    again.activate(experiment)


@experiment.command()
@experiment_argument
def cancel(experiment: ExperimentFolder) -> None:
    """End an experiment after another checkpoint of each of its trials.

    \b
    Example:
      hpc-det experiment cancel 12
    """
    from hpc_det.cli import control

    click.echo(control.cancel(experiment))


@experiment.command()
@experiment_argument
def kill(experiment: ExperimentFolder) -> None:
    """End an experiment now, with all its trials and jobs, without another checkpoint.

    \b
    Example:
      hpc-det experiment kill 12
    """
    from hpc_det.cli import control

    click.echo(control.kill(experiment))
